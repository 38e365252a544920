//! Devices and memory as plain data.

use super::status::{c_string, ort, slice_from, string_from};
use super::{Api, sys};
use crate::error::Result;

/// What kind of hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DeviceKind {
    Cpu,
    Gpu,
    Npu,
    /// A kind this library does not know, by ORT's number.
    Other(i32),
}

/// A piece of hardware that ORT found.
#[derive(Debug, Clone)]
pub struct HardwareDevice {
    /// Its kind.
    pub kind: DeviceKind,
    /// The PCI vendor id, 0x10DE for NVIDIA.
    pub vendor_id: u32,
    /// The PCI device id, or 0.
    pub device_id: u32,
    /// The vendor's name.
    pub vendor: String,
    /// What else ORT knows.
    pub metadata: Vec<(String, String)>,
}

impl HardwareDevice {
    /// # Safety
    /// `raw` is a live hardware device.
    pub(crate) unsafe fn read(api: Api, raw: *const sys::OrtHardwareDevice) -> Self {
        // SAFETY: the caller vouches for `raw`; the strings and pairs belong to it.
        unsafe {
            let ort = api.ort();
            // Newer runtimes may know more kinds than the Rust enum, so read the C enum as the int it is.
            let kind_of: unsafe extern "system" fn(*const sys::OrtHardwareDevice) -> i32 =
                std::mem::transmute((*ort).HardwareDevice_Type);
            Self {
                kind: match kind_of(raw) {
                    0 => DeviceKind::Cpu,
                    1 => DeviceKind::Gpu,
                    2 => DeviceKind::Npu,
                    other => DeviceKind::Other(other),
                },
                vendor_id: ((*ort).HardwareDevice_VendorId)(raw),
                device_id: ((*ort).HardwareDevice_DeviceId)(raw),
                vendor: string_from(((*ort).HardwareDevice_Vendor)(raw)),
                metadata: read_pairs(api, ((*ort).HardwareDevice_Metadata)(raw)),
            }
        }
    }
}

impl DeviceKind {
    /// # Safety
    /// `raw` is a live memory device.
    pub(crate) unsafe fn read(api: Api, raw: *const sys::OrtMemoryDevice) -> Self {
        // SAFETY: the caller vouches for `raw`.
        match unsafe { ((*api.ep()).MemoryDevice_GetDeviceType)(raw) } {
            // `OrtMemoryInfoDeviceType` numbers 2 for FPGA and 3 for NPU.
            0 => Self::Cpu,
            1 => Self::Gpu,
            3 => Self::Npu,
            other => Self::Other(other),
        }
    }
}

/// Which of a device's memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// The device's own.
    Default,
    /// Memory that the host can reach too, e.g. pinned.
    HostAccessible,
    /// A kind this library does not know, by ORT's number.
    Other(i32),
}

/// A place where a tensor can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryDevice {
    /// The device that owns the memory.
    pub kind: DeviceKind,
    /// Which of its memories.
    pub memory: MemoryKind,
    /// The PCI vendor id.
    pub vendor_id: u32,
    /// The ordinal among the vendor's devices.
    pub device_id: u32,
}

impl MemoryDevice {
    /// Whether the host can read and write the memory.
    pub fn host_can_access(&self) -> bool {
        self.kind == DeviceKind::Cpu || self.memory == MemoryKind::HostAccessible
    }

    /// # Safety
    /// `raw` is a live memory device.
    pub(crate) unsafe fn read(api: Api, raw: *const sys::OrtMemoryDevice) -> Self {
        // SAFETY: the caller vouches for `raw`.
        unsafe {
            let ep = api.ep();
            Self {
                kind: DeviceKind::read(api, raw),
                memory: match ((*ep).MemoryDevice_GetMemoryType)(raw) {
                    0 => MemoryKind::Default,
                    5 => MemoryKind::HostAccessible,
                    other => MemoryKind::Other(other),
                },
                vendor_id: ((*ep).MemoryDevice_GetVendorId)(raw),
                device_id: ((*ep).MemoryDevice_GetDeviceId)(raw),
            }
        }
    }
}

/// A memory that an EP offers.
#[derive(Debug, Clone)]
pub struct MemoryInfo {
    /// The allocator's name; ORT matches by `device`, not by name.
    pub name: String,
    /// The place. `kind` must be Cpu, Gpu or Npu and `memory` Default or HostAccessible.
    pub device: MemoryDevice,
    /// Alignment in bytes that the allocator gives, or 0.
    pub alignment: usize,
}

/// An `OrtMemoryInfo` that this library owns.
pub(crate) struct OwnedMemoryInfo {
    api: Api,
    pub(crate) raw: *mut sys::OrtMemoryInfo,
    pub(crate) device: MemoryDevice,
}

// SAFETY: ORT only reads a memory info after its creation.
unsafe impl Send for OwnedMemoryInfo {}
// SAFETY: as above.
unsafe impl Sync for OwnedMemoryInfo {}

impl OwnedMemoryInfo {
    pub(crate) fn new(api: Api, info: &MemoryInfo) -> Result<Self> {
        let unknown = || crate::Error::Internal(format!("no ORT memory info can say {:?}", info.device));
        let kind = match info.device.kind {
            DeviceKind::Cpu => sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU,
            DeviceKind::Gpu => sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_GPU,
            DeviceKind::Npu => sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_NPU,
            DeviceKind::Other(_) => return Err(unknown()),
        };
        let memory = match info.device.memory {
            MemoryKind::Default => sys::OrtDeviceMemoryType::OrtDeviceMemoryType_DEFAULT,
            MemoryKind::HostAccessible => sys::OrtDeviceMemoryType::OrtDeviceMemoryType_HOST_ACCESSIBLE,
            MemoryKind::Other(_) => return Err(unknown()),
        };
        let id = i32::try_from(info.device.device_id).map_err(|_| unknown())?;
        let name = c_string(&info.name);
        let mut raw = std::ptr::null_mut();
        // SAFETY: ORT copies the name; the out pointer is ours.
        unsafe {
            let allocator = sys::OrtAllocatorType::OrtDeviceAllocator;
            ort!(
                api,
                CreateMemoryInfo_V2(
                    name.as_ptr(),
                    kind,
                    info.device.vendor_id,
                    id,
                    memory,
                    info.alignment,
                    allocator,
                    &raw mut raw
                )
            )?;
        }
        Ok(Self { api, raw, device: info.device })
    }
}

impl Drop for OwnedMemoryInfo {
    fn drop(&mut self) {
        // SAFETY: created by `CreateMemoryInfo_V2`, released once.
        unsafe { ((*self.api.ort()).ReleaseMemoryInfo)(self.raw) }
    }
}

/// Key-value pairs that this library owns.
pub(crate) struct OwnedPairs {
    api: Api,
    pub(crate) raw: *mut sys::OrtKeyValuePairs,
}

impl OwnedPairs {
    pub(crate) fn new(api: Api, pairs: &[(String, String)]) -> Self {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out pointer is ours; ORT copies the strings.
        unsafe {
            ((*api.ort()).CreateKeyValuePairs)(&raw mut raw);
            for (key, value) in pairs {
                let (key, value) = (c_string(key), c_string(value));
                ((*api.ort()).AddKeyValuePair)(raw, key.as_ptr(), value.as_ptr());
            }
        }
        Self { api, raw }
    }

    /// # Safety
    /// `raw` is null or pairs that the caller owns and gives away.
    pub(crate) unsafe fn adopt(api: Api, raw: *mut sys::OrtKeyValuePairs) -> Self {
        Self { api, raw }
    }

    pub(crate) fn read(&self) -> Vec<(String, String)> {
        // SAFETY: the pairs are live.
        unsafe { read_pairs(self.api, self.raw) }
    }

    /// Gives the pairs away.
    pub(crate) fn into_raw(self) -> *mut sys::OrtKeyValuePairs {
        std::mem::ManuallyDrop::new(self).raw
    }
}

impl Drop for OwnedPairs {
    fn drop(&mut self) {
        // SAFETY: owned; ORT accepts null.
        unsafe { ((*self.api.ort()).ReleaseKeyValuePairs)(self.raw) }
    }
}

/// # Safety
/// `raw` is null or live pairs.
pub(crate) unsafe fn read_pairs(api: Api, raw: *const sys::OrtKeyValuePairs) -> Vec<(String, String)> {
    if raw.is_null() {
        return Vec::new();
    }
    let (mut keys, mut values, mut len) = (std::ptr::null(), std::ptr::null(), 0usize);
    // SAFETY: the pairs are live; both arrays have `len` strings that belong to them.
    unsafe {
        ((*api.ort()).GetKeyValuePairs)(raw, &raw mut keys, &raw mut values, &raw mut len);
        let (keys, values) = (slice_from(keys, len), slice_from(values, len));
        let pairs = keys.iter().zip(values);
        pairs.map(|(&k, &v)| (string_from(k), string_from(v))).collect()
    }
}
