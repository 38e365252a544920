//! `nxrt_ep_cuda._native`: what the Python package asks of the Rust code.

ep_python::native_module!(nxrt_ep_cuda);
