//! What the native modules of the wheels share: `explain` and the declared options as Python values.

use abi::options::OptionDef;
use kernels::explain::Explanation;
use kernels::settings::Settings;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::Path;

/// A declared provider option: (name, type, default, help).
pub type OptionRow = (&'static str, String, &'static str, &'static str);

/// The declared provider options.
pub fn options(declared: &[OptionDef]) -> Vec<OptionRow> {
    declared.iter().map(|o| (o.name, o.kind.to_string(), o.default, o.help)).collect()
}

/// Says what an execution provider with `settings` takes of the model file at `path`:
/// `{"nodes": [{"name", "op", "group", "reason"}], "groups": int}` with `None` for the one that does not apply.
///
/// # Errors
/// ValueError for a damaged model and for settings that are an error.
pub fn explain<'py>(py: Python<'py>, path: &Path, settings: abi::Result<Settings>) -> PyResult<Bound<'py, PyDict>> {
    let to_py = |error: abi::Error| PyValueError::new_err(error.to_string());
    let settings = settings.map_err(to_py)?;
    let explanation = py.detach(|| kernels::explain::explain(path, &settings)).map_err(to_py)?;
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

/// The module `_native` of a wheel whose execution provider's crate is `$ep`.
#[macro_export]
macro_rules! native_module {
    ($ep:ident) => {
        /// Private native half of the package.
        #[::pyo3::pymodule]
        mod _native {
            use ::pyo3::prelude::*;

            /// The version of the crate, and so of the wheel.
            #[pymodule_export]
            const VERSION: &str = env!("CARGO_PKG_VERSION");

            /// The declared provider options: (name, type, default, help).
            #[pyfunction]
            fn options() -> Vec<$crate::OptionRow> {
                $crate::options($ep::options::OPTIONS)
            }

            /// Says what the execution provider takes of the model file at `path`, under these provider options.
            #[pyfunction]
            fn explain<'py>(
                py: Python<'py>,
                path: ::std::path::PathBuf,
                options: Vec<(String, String)>,
            ) -> PyResult<Bound<'py, ::pyo3::types::PyDict>> {
                let given = options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
                $crate::explain(py, &path, $ep::options::settings(given))
            }
        }
    };
}
