//! Kernels on CUDA devices. A kernel's host part writes launches down ([`Launch`], with symbolic addresses); a plan
//! instance joins them into a [`Program`]; ep-cuda runs programs, eagerly or as CUDA graphs.
//!
//! Device code shared by the ops' `.cu` files lies in this folder's `.cuh` files.

mod device;
mod host;
pub mod images;
mod kernel;
mod launch;
pub mod number;
mod product;
mod program;
mod tiles;
pub mod walk;
mod weights;

pub use device::{Buffer, Device, DeviceMemory, Limits, Pinned, Window};
pub use host::{Fetched, HostCx, HostStep};
pub use kernel::{COUNTER_BYTES, DeviceKernel, DeviceTensor, LaunchCx, linear, suffix};
pub use launch::{Base, Bases, DevPtr, Field, Launch, Params};
pub use product::{ConstantProduct, ProductKernels, ProductParams, gemv_shape, lean_shape, staged_rows};
pub(crate) use program::DeviceSide;
pub use program::{Program, Work};
pub use weights::{BATCH_RANK, Batch, Weights};
