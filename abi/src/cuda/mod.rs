//! A thin layer over the CUDA driver API. `libcuda` is opened at run time; the CUDA runtime is never used.
//!
//! Every object holds the [`Context`] that it belongs to and makes it current where a call needs that. Device
//! addresses are plain numbers: what is done with them is `unsafe` where it happens later than the call.

/// Calls a driver function and turns its result into ours. Unsafe as the function is.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::check(stringify!($name), cudarc::driver::sys::$name($($argument),*))
    };
}

mod context;
mod graph;
mod library;
mod stream;

pub use context::{Context, Current, DeviceBuffer};
pub use graph::{Exec, Graph, LaunchShape, launch};
pub use library::{Function, Library};
pub use stream::{Event, Stream};

use crate::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

/// The oldest driver that serves, as `cuDriverGetVersion` counts: 13.0, which the bound entry points and the
/// compressed kernel images need.
const MIN_VERSION: i32 = 13000;

/// The error code of a driver that is missing or too old.
const NO_DRIVER: i32 = CUresult::CUDA_ERROR_NOT_INITIALIZED as i32;

/// PCI vendor of NVIDIA.
const NVIDIA: u32 = 0x10de;

/// What the EP needs to know of a GPU.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The driver's number of the device.
    pub ordinal: u32,
    /// The product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory that a block may ask for, in bytes.
    pub shared_limit: u32,
    /// Memory of the device in bytes.
    pub total_memory: usize,
    /// L2 cache in bytes.
    pub l2_bytes: usize,
    /// The PCI device id, 0 where the driver does not tell.
    pub pci_device_id: u32,
}

/// The GPUs that the driver offers, or a sentence why none can be used.
pub fn devices() -> Result<Vec<DeviceInfo>, String> {
    driver().map_err(|e| match e {
        // No call was made that could have failed, so the sentence stands alone.
        Error::Cuda { code: NO_DRIVER, message, .. } => message,
        e => e.to_string(),
    })?;
    let mut count = 0;
    // SAFETY: the driver is there and initialised; it writes one int.
    unsafe { call!(cuDeviceGetCount(&mut count)) }.map_err(|e| e.to_string())?;
    if count < 1 {
        return Err("the NVIDIA driver offers no GPU".into());
    }
    (0..count as u32)
        .map(|ordinal| DeviceInfo::read(ordinal).map(|(_, info)| info).map_err(|e| e.to_string()))
        .collect()
}

impl DeviceInfo {
    /// Asks the initialised driver about device `ordinal`.
    fn read(ordinal: u32) -> Result<(sys::CUdevice, Self)> {
        let mut device = 0;
        let mut name = [0 as c_char; 256];
        let mut total_memory = 0;
        // SAFETY: the driver checks the ordinal, and each result has room for what is written.
        unsafe {
            call!(cuDeviceGet(&mut device, ordinal as i32))?;
            call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            call!(cuDeviceTotalMem_v2(&mut total_memory, device))?;
        }
        // SAFETY: the last byte was not the driver's to write, so there is a terminator.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |which| -> Result<u32> {
            let mut value = 0;
            // SAFETY: `device` is the driver's own; it writes one int.
            unsafe { call!(cuDeviceGetAttribute(&mut value, which, device)) }?;
            Ok(value as u32)
        };
        let info = Self {
            ordinal,
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_limit: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            total_memory,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            pci_device_id: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID).map_or(0, pci_device),
        };
        Ok((device, info))
    }

    /// Whether blocks may form clusters, which reach each other's shared memory.
    pub fn has_clusters(&self) -> bool {
        self.capability >= (9, 0)
    }

    /// Whether a kernel may start before the one in front of it has ended (programmatic dependent launch).
    fn overlaps(&self) -> bool {
        self.capability >= (9, 0)
    }
}

/// The device id of the driver's pair of device (upper half) and vendor.
fn pci_device(pair: u32) -> u32 {
    if pair & 0xffff == NVIDIA { pair >> 16 } else { 0 }
}

/// Opens and initialises the driver once; a sentence where that cannot be. Nothing else may be called before,
/// since a missing library or entry point is a panic of the binding.
fn driver() -> Result<()> {
    static DRIVER: OnceLock<Result<()>> = OnceLock::new();
    let unusable = |message| Error::Cuda { call: "cuInit", code: NO_DRIVER, message };
    let open = || {
        // SAFETY: opening libcuda runs its initialisers, which is what every CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(unusable("the NVIDIA driver's library libcuda.so.1 was not found".into()));
        }
        let mut version = 0;
        // SAFETY: every driver has this entry point and answers before cuInit; it writes one int.
        unsafe { call!(cuDriverGetVersion(&mut version)) }?;
        check_version(version).map_err(unusable)?;
        // SAFETY: 0 is the one value allowed.
        unsafe { call!(cuInit(0)) }
    };
    DRIVER.get_or_init(open).clone()
}

fn check_version(version: i32) -> Result<(), String> {
    let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    match version {
        MIN_VERSION.. => Ok(()),
        _ => Err(format!(
            "the NVIDIA driver is too old: it supports CUDA {}, and CUDA {} or newer is needed",
            text(version),
            text(MIN_VERSION)
        )),
    }
}

fn check(call: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(failed(call, result)),
    }
}

#[cold]
fn failed(call: &'static str, result: CUresult) -> Error {
    let code = result as i32;
    let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult, otherwise: &str| {
        let mut text = std::ptr::null();
        // SAFETY: the driver answered already, so it is there; it writes one pointer, null for an unknown code.
        let known = unsafe { ask(result, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: a text that the driver gives is static and terminated.
        if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { otherwise.into() }
    };
    let name = text(sys::cuGetErrorName, "unknown error");
    let message = format!("{name} ({code}): {}", text(sys::cuGetErrorString, "the driver has no text for it"));
    Error::Cuda { call: call.trim_end_matches("_v2"), code, message }
}

/// Whether `error` is the driver's word for memory that cannot be had.
fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Cuda { code, .. } if *code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32)
}

#[cfg(test)]
mod tests;
