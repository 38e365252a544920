//! `nxrt_ep_cpu._native`: what the Python package asks of the Rust code.

use kernels::explain::Explanation;
use nxrt_ep_cpu::options;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::PathBuf;

/// Private native half of `nxrt_ep_cpu`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{explain, options_list};

    /// The version of the crate, and so of the wheel.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

/// The declared provider options: (name, type, default, help).
#[pyfunction]
#[pyo3(name = "options")]
fn options_list() -> Vec<(&'static str, String, &'static str, &'static str)> {
    options::OPTIONS.iter().map(|o| (o.name, o.kind.to_string(), o.default, o.help)).collect()
}

/// Says what the execution provider takes of the model file at `path`, under these provider options:
/// `{"nodes": [{"name", "op", "group", "reason"}], "groups": int}` with `None` for the one that does not apply.
///
/// ValueError for a damaged model and for a bad option.
#[pyfunction]
fn explain<'py>(py: Python<'py>, path: PathBuf, options: Vec<(String, String)>) -> PyResult<Bound<'py, PyDict>> {
    let given = options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let to_py = |error: abi::Error| PyValueError::new_err(error.to_string());
    let settings = options::settings(given).map_err(to_py)?;
    let explanation = py.detach(|| kernels::explain::explain(&path, &settings)).map_err(to_py)?;
    to_dict(py, &explanation)
}

fn to_dict<'py>(py: Python<'py>, explanation: &Explanation) -> PyResult<Bound<'py, PyDict>> {
    let nodes = PyList::empty(py);
    for verdict in &explanation.nodes {
        let node = PyDict::new(py);
        node.set_item("name", &verdict.name)?;
        node.set_item("op", &verdict.op)?;
        node.set_item("group", verdict.place.as_ref().ok())?;
        node.set_item("reason", verdict.place.as_ref().err())?;
        nodes.append(node)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("nodes", nodes)?;
    dict.set_item("groups", explanation.groups)?;
    Ok(dict)
}
