//! The kernels of the Memcpy nodes, which ORT puts between its CPU nodes and an EP's.

use super::context::type_and_shape;
use super::factory::FactoryState;
use super::memory::{DataTransfer, tensor_copy};
use super::status::{caught_or, ort, ort_ep};
use super::stream::StreamRef;
use super::{Api, sys};
use crate::error::{Error, Result};
use crate::tensor::DType;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// The kernels, as ORT asks for them.
pub(crate) struct MemcpyRegistry {
    api: Api,
    raw: *mut sys::OrtKernelRegistry,
}

// SAFETY: ORT only reads a registry after its kernels were added.
unsafe impl Send for MemcpyRegistry {}
// SAFETY: as above.
unsafe impl Sync for MemcpyRegistry {}

impl MemcpyRegistry {
    /// The kernels of this factory, whose state is to hold the result: they refer to it.
    pub(crate) fn new(factory: &Arc<FactoryState>) -> Result<Self> {
        let api = factory.api();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out pointer is ours.
        unsafe { ort_ep!(api, CreateKernelRegistry(&raw mut raw))? };
        let registry = Self { api, raw };
        let types = tensor_types(api);
        for (op, from_host) in [(c"MemcpyFromHost", true), (c"MemcpyToHost", false)] {
            let def = Def::new(api, factory.name(), op, from_host, &types)?;
            let state = Arc::as_ptr(factory).cast_mut().cast::<c_void>();
            // SAFETY: registry and definition are live; ORT copies the definition.
            unsafe { ort_ep!(api, KernelRegistry_AddKernel(raw, def.raw, create_kernel, state))? };
        }
        Ok(registry)
    }

    pub(crate) fn raw(&self) -> *const sys::OrtKernelRegistry {
        self.raw
    }
}

impl Drop for MemcpyRegistry {
    fn drop(&mut self) {
        // SAFETY: made by `CreateKernelRegistry`, released once.
        unsafe { ((*self.api.ep()).ReleaseKernelRegistry)(self.raw) }
    }
}

/// The tensor types that this runtime has and that are plain bytes.
fn tensor_types(api: Api) -> Vec<*const sys::OrtDataType> {
    // Codes start at 1; the newest are not known to older runtimes, which answer with an error.
    let plain = (1..).map_while(|code| Some((code, DType::from_ort(code)?))).filter(|(_, t)| *t != DType::String);
    let types = plain.filter_map(|(code, _)| {
        let mut made = std::ptr::null();
        // SAFETY: the out pointer is ours; ORT keeps the type for good.
        unsafe { ort_ep!(api, GetTensorDataType(code, &raw mut made)) }.ok()?;
        (!made.is_null()).then_some(made)
    });
    types.collect()
}

/// What ORT knows of a kernel.
struct Def {
    api: Api,
    raw: *mut sys::OrtKernelDef,
}

impl Def {
    fn new(api: Api, ep: &CStr, op: &CStr, from_host: bool, types: &[*const sys::OrtDataType]) -> Result<Self> {
        let mut builder = std::ptr::null_mut();
        // SAFETY: the out pointer is ours.
        unsafe { ort_ep!(api, CreateKernelDefBuilder(&raw mut builder))? };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the builder is live until its release below; ORT copies strings and types.
        let built = unsafe {
            (|| {
                ort_ep!(api, KernelDefBuilder_SetOperatorType(builder, op.as_ptr()))?;
                ort_ep!(api, KernelDefBuilder_SetDomain(builder, c"".as_ptr()))?;
                ort_ep!(api, KernelDefBuilder_SetSinceVersion(builder, 1, i32::MAX))?;
                ort_ep!(api, KernelDefBuilder_SetExecutionProvider(builder, ep.as_ptr()))?;
                match from_host {
                    true => {
                        let host = sys::OrtMemType::OrtMemTypeCPUInput;
                        ort_ep!(api, KernelDefBuilder_SetInputMemType(builder, 0, host))?;
                    }
                    false => {
                        let host = sys::OrtMemType::OrtMemTypeCPUOutput;
                        ort_ep!(api, KernelDefBuilder_SetOutputMemType(builder, 0, host))?;
                    }
                }
                let (all, count) = (types.as_ptr(), types.len());
                ort_ep!(api, KernelDefBuilder_AddTypeConstraint(builder, c"T".as_ptr(), all, count))?;
                ort_ep!(api, KernelDefBuilder_Build(builder, &raw mut raw))
            })()
        };
        // SAFETY: made above, released once.
        unsafe { ((*api.ep()).ReleaseKernelDefBuilder)(builder) };
        built.map(|()| Self { api, raw })
    }
}

impl Drop for Def {
    fn drop(&mut self) {
        // SAFETY: made by `KernelDefBuilder_Build`, released once.
        unsafe { ((*self.api.ep()).ReleaseKernelDef)(self.raw) }
    }
}

/// What ORT holds as an `OrtKernelImpl`.
#[repr(C)]
struct KernelObject {
    c: sys::OrtKernelImpl,
    api: Api,
    transfer: Arc<dyn DataTransfer>,
    /// Keeps what the transfer came from alive.
    _factory: Arc<FactoryState>,
}

// Every callback below: ORT passes the state or the object that it got here, and arguments that live as long as the
// call.

unsafe extern "system" fn create_kernel(
    state: *mut c_void,
    _info: *const sys::OrtKernelInfo,
    out: *mut *mut sys::OrtKernelImpl,
) -> sys::OrtStatusPtr {
    let state = state.cast_const().cast::<FactoryState>();
    // SAFETY: the state is from `Arc::as_ptr`; the session's EP keeps the factory's state alive.
    let factory = unsafe {
        Arc::increment_strong_count(state);
        Arc::from_raw(state)
    };
    factory.api().guard("CreateKernel", || {
        let transfer = factory.data_transfer();
        let transfer = transfer.ok_or_else(|| Error::Internal("Memcpy kernels of an EP that cannot copy".into()))?;
        let c = sys::OrtKernelImpl {
            ort_version_supported: sys::COMPILED,
            Compute: Some(compute),
            Release: Some(release),
            ..Default::default()
        };
        let object = KernelObject { c, api: factory.api(), transfer, _factory: factory.clone() };
        // SAFETY: ORT's contract, see above.
        unsafe { out.write(Box::into_raw(Box::new(object)).cast()) };
        Ok(())
    })
}

unsafe extern "system" fn compute(
    this: *mut sys::OrtKernelImpl,
    context: *mut sys::OrtKernelContext,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above; nothing borrows the object mutably.
    let object = unsafe { &*this.cast::<KernelObject>() };
    let api = object.api;
    api.guard("Compute", || {
        let (mut src, mut dst, mut stream) = (std::ptr::null(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: ORT's contract, see above. The node has one input and one output, both live as long as the call;
        // `usize` and `i64` have one layout and the input's dimensions are in both ranges.
        let copy = unsafe {
            ort!(api, KernelContext_GetInput(context, 0, &raw mut src))?;
            if src.is_null() {
                return Err(Error::Internal("ORT passed no value to copy".into()));
            }
            let (_, shape) = type_and_shape(api, src)?;
            let dims = shape.as_ptr().cast::<i64>();
            ort!(api, KernelContext_GetOutput(context, 0, dims, shape.len(), &raw mut dst))?;
            if dst.is_null() {
                return Err(Error::Internal("ORT gave no value to copy to".into()));
            }
            ort!(api, KernelContext_GetGPUComputeStream(context, &raw mut stream))?;
            tensor_copy(api, src, dst, StreamRef::of_handle(api, stream))?
        };
        object.transfer.copy(&mut std::iter::once(Ok(copy)))
    })
}

unsafe extern "system" fn release(this: *mut sys::OrtKernelImpl) {
    // SAFETY: ORT's contract, see above; released once.
    let object = unsafe { Box::from_raw(this.cast::<KernelObject>()) };
    caught_or((), || drop(object));
}
