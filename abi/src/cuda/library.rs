//! Kernel images and their functions.

use super::Context;
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A loaded kernel image.
pub struct Library {
    context: Arc<Context>,
    handle: sys::CUlibrary,
    /// Held while a function's limit is read and raised.
    limits: Mutex<()>,
}

// SAFETY: libraries may be used from any thread; the driver locks.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a whole, well-formed image (fatbin or cubin). The driver keeps its own copy of it.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        let _current = context.enter()?;
        let copy;
        // Embedded bytes may lie at any address.
        let code = if image.as_ptr().cast::<u64>().is_aligned() {
            image.as_ptr()
        } else {
            copy = words(image);
            copy.as_ptr().cast()
        };
        let mut handle = null_mut();
        // SAFETY: the image says how long it is, and the caller gives all of it; there are no options.
        unsafe {
            call!(cuLibraryLoadData(&mut handle, code.cast(), null_mut(), null_mut(), 0, null_mut(), null_mut(), 0))
        }?;
        Ok(Arc::new(Self { context: context.clone(), handle, limits: Mutex::new(()) }))
    }

    /// The kernel called `name`. All of them leave L1 the same share of a multiprocessor's memory, the least: a block waits for
    /// a multiprocessor to be empty where its kernel wants another share than the one that runs there.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let _current = self.context.enter()?;
        let c_name = CString::new(name).map_err(|_| Error::Internal(format!("kernel name {name:?} has a NUL")))?;
        let (mut kernel, mut handle) = (null_mut(), null_mut());
        let (mut offset, mut parameter_bytes) = (0, 0);
        // SAFETY: library and name are alive, the context is current, and the driver writes one handle each.
        unsafe {
            call!(cuLibraryGetKernel(&mut kernel, self.handle, c_name.as_ptr())).map_err(|e| named(e, name))?;
            call!(cuKernelGetFunction(&mut handle, kernel)).map_err(|e| named(e, name))?;
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            call!(cuFuncSetAttribute(handle, attribute, MOST_SHARED)).map_err(|e| named(e, name))?;
        }
        // SAFETY: the kernel is alive; the driver writes two sizes.
        match unsafe { call!(cuKernelGetParamInfo(kernel, 0, &mut offset, &mut parameter_bytes)) } {
            Err(Error::Cuda { code, .. }) if code == CUresult::CUDA_ERROR_INVALID_VALUE as i32 => parameter_bytes = 0,
            got => got?,
        }
        let library = self.clone();
        let shared_limit = AtomicU32::new(0);
        Ok(Function(Arc::new(Inner { library, handle, name: name.into(), parameter_bytes, shared_limit })))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: nobody has a function of it any more, and queued kernels are waited for.
            unsafe {
                let _ = sys::cuCtxSynchronize();
                let _ = sys::cuLibraryUnload(self.handle);
            }
        }
    }
}

/// Adds which kernel a failed look-up was for.
fn named(error: Error, name: &str) -> Error {
    match error {
        Error::Cuda { call, code, message } => {
            Error::Cuda { call, code, message: format!("{message} (kernel {name})") }
        }
        other => other,
    }
}

/// A copy of the image at an address that its 8-byte fields need; zeros fill up the last word.
fn words(image: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(bytes)
    };
    image.chunks(8).map(word).collect()
}

/// As much shared memory as there is, in percent (`CU_SHAREDMEM_CARVEOUT_MAX_SHARED`).
const MOST_SHARED: i32 = 100;

/// A kernel. Clones share it, and equal ones are the same kernel of the same library.
#[derive(Clone)]
pub struct Function(Arc<Inner>);

struct Inner {
    library: Arc<Library>,
    handle: sys::CUfunction,
    name: String,
    parameter_bytes: usize,
    /// Dynamic shared bytes that are known to be allowed.
    shared_limit: AtomicU32,
}

// SAFETY: functions may be used from any thread; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The `CUfunction`.
    pub(super) fn handle(&self) -> sys::CUfunction {
        self.0.handle
    }

    /// The context that it is loaded in.
    pub fn context(&self) -> &Arc<Context> {
        &self.0.library.context
    }

    /// Whether `other` is the same kernel of the same library.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.handle == other.0.handle
    }

    /// Checks the size of a parameter struct, which the driver itself cannot know.
    pub(super) fn check_parameters(&self, params: &[u8]) -> Result<()> {
        if params.len() == self.0.parameter_bytes {
            return Ok(());
        }
        let Inner { name, parameter_bytes, .. } = &*self.0;
        Err(Error::Internal(format!("kernel {name} takes {parameter_bytes} bytes of parameters, got {}", params.len())))
    }

    /// Allows launches with up to `bytes` dynamic shared bytes a block. Never lowers what is allowed.
    pub fn set_shared_limit(&self, bytes: u32) -> Result<()> {
        if bytes <= self.0.shared_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _held = self.0.library.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut allowed = self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        if bytes > allowed {
            let _current = self.context().enter()?;
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is alive; the driver refuses a size that the device does not have.
            unsafe { call!(cuFuncSetAttribute(self.0.handle, attribute, bytes as i32)) }
                .map_err(|e| named(e, &self.0.name))?;
            allowed = bytes;
        }
        self.0.shared_limit.fetch_max(allowed, Ordering::Relaxed);
        Ok(())
    }

    /// Registers a thread.
    pub fn registers(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Most threads a block that it can be launched with.
    pub fn max_threads(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
    }

    /// Blocks of `block` threads and `shared` dynamic bytes that one multiprocessor holds at once.
    pub fn max_blocks_per_multiprocessor(&self, block: u32, shared: u32) -> Result<u32> {
        let _current = self.context().enter()?;
        let mut blocks = 0;
        // SAFETY: the function is alive; the driver writes one int.
        unsafe {
            call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.0.handle,
                block as i32,
                shared as usize
            ))
        }?;
        Ok(blocks as u32)
    }

    fn attribute(&self, which: Attribute) -> Result<u32> {
        let _current = self.context().enter()?;
        let mut value = 0;
        // SAFETY: the function is alive; the driver writes one int.
        unsafe { call!(cuFuncGetAttribute(&mut value, which, self.0.handle)) }?;
        Ok(value as u32)
    }
}

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

impl Eq for Function {}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Function({})", self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn a_moved_image_keeps_its_bytes() {
        let image: Vec<u8> = (0..13).collect();
        let copy = words(&image);
        let bytes: Vec<u8> = copy.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(bytes[..13], image);
        assert_eq!(bytes[13..], [0; 3]);
    }
}
