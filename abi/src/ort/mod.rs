//! ONNX Runtime's plugin-EP C ABI.
//!
//! An EP implements [`Factory`], [`Ep`] and [`Compiled`], and calls [`crate::export_factory!`] once. Everything else
//! here turns ORT's objects into the crate's plain data. One binary serves ORT 1.24 to 1.32: see [`Api`].

mod attrs;
mod context;
mod device;
mod ep;
mod factory;
mod log;
mod memcpy;
mod memory;
mod reader;
mod session;
mod status;
mod stream;
#[doc(hidden)]
pub mod sys;
mod version;

pub use context::{Context, Input, Output};
pub use device::{DeviceKind, HardwareDevice, MemoryDevice, MemoryInfo, MemoryKind};
pub use ep::{Compiled, Ep, RunOptions};
pub use factory::{Device, Factory, Registration};
#[doc(hidden)]
pub use factory::{create_factories, release_factory};
pub use log::{Level, Logger};
pub use memory::{Allocator, AllocatorSource, DataTransfer, TensorCopy};
pub use session::SessionOptions;
pub use stream::{Notification, Stream, StreamRef, StreamSource};
pub use version::{Api, OLDEST_MINOR};
