//! `nxrt_ep_cpu._native`: what the Python package asks of the Rust code, as JSON strings.

use pyo3::prelude::*;

/// Private native half of `nxrt_ep_cpu`.
#[pymodule]
mod _native {
    /// The version of the crate, and so of the wheel.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
