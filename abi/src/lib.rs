//! The C ABI of ONNX Runtime (ORT) as safe traits and plain data.
//!
//! The plain data ([`graph`], [`tensor`], [`error`], [`options`]) is what every other crate speaks; all
//! FFI `unsafe` stays in [`ort`] and [`cuda`].

mod counters;
pub mod cuda;
pub mod error;
pub mod file;
pub mod graph;
pub mod onnx;
pub mod options;
pub mod ort;
pub mod parallel;
pub mod tensor;

pub use error::{Error, Result};
pub use graph::{Attr, Dim, Graph, Initializer, InitializerData, Node, NodeId, Value, ValueId};
pub use parallel::{ParallelFor, Serial};
pub use tensor::{DType, HostTensor};
