//! EP devices for the machine's GPUs.

use crate::ep::CudaEp;
use crate::gpu::{Gpu, gpus};
use crate::memory::{Allocators, VENDOR, memories};
use crate::options;
use crate::stream::Streams;
use crate::transfer::Transfer;
use abi::cuda::DeviceInfo;
use abi::ort::{
    AllocatorSource, DataTransfer, Device, DeviceKind, Ep, Factory, HardwareDevice, Level, Logger, Registration,
    SessionOptions, StreamSource,
};
use abi::{Error, Result};
use std::sync::Arc;

/// The name that the EP goes by unless the user registers another.
pub const EP_NAME: &str = "NxrtCudaExecutionProvider";

/// ORT has room for so many EP devices.
const MOST_DEVICES: usize = 8;

/// Called by ORT when the library is registered.
pub fn create(registration: &Registration) -> Result<Box<dyn Factory>> {
    // A machine without a GPU is no error: a failed registration leaves ORT half-registered.
    let gpus = gpus().unwrap_or_else(|reason| {
        if let Some(logger) = &registration.logger {
            logger.log(Level::Warning, format_args!("no CUDA device: {reason}"));
        }
        &[]
    });
    let gpus = &gpus[..gpus.len().min(MOST_DEVICES)];
    Ok(Box::new(CudaFactory {
        name: registration.ep_name(EP_NAME),
        gpus,
        allocators: Allocators(gpus),
        transfer: Arc::new(Transfer(gpus)),
        streams: Streams { gpus, user_stream: None },
    }))
}

struct CudaFactory {
    name: String,
    gpus: &'static [Arc<Gpu>],
    allocators: Allocators,
    transfer: Arc<Transfer>,
    streams: Streams,
}

impl Factory for CudaFactory {
    fn name(&self) -> &str {
        &self.name
    }

    fn vendor(&self) -> &str {
        "nxrt"
    }

    fn vendor_id(&self) -> u32 {
        VENDOR
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn devices(&self, hardware: &[HardwareDevice]) -> Result<Vec<Device>> {
        let infos: Vec<_> = self.gpus.iter().map(|gpu| gpu.info()).collect();
        let places = places(hardware, &infos);
        let device = |(info, hardware): (&&DeviceInfo, usize)| Device {
            hardware,
            metadata: metadata(info),
            options: vec![("device_id".into(), info.ordinal.to_string())],
            memory: memories(info.ordinal),
        };
        Ok(infos.iter().zip(places).filter_map(|(info, place)| Some(device((info, place?)))).collect())
    }

    fn create_ep(&self, session: &SessionOptions, logger: Logger) -> Result<Box<dyn Ep>> {
        let choices = options::choices(session, &self.name)?;
        for name in &choices.ignored {
            logger.log(Level::Verbose, format_args!("{}: option '{name}' changes nothing here", self.name));
        }
        let gpu = self.gpus.get(choices.device as usize).ok_or_else(|| Error::Option {
            name: "device_id".into(),
            got: choices.device.to_string(),
            expected: format!("the number of one of the {} GPUs", self.gpus.len()),
        })?;
        let streams = Streams { gpus: self.gpus, user_stream: choices.user_stream };
        Ok(Box::new(CudaEp::new(gpu.clone(), choices, streams, logger)))
    }

    fn allocators(&self) -> Option<&dyn AllocatorSource> {
        Some(&self.allocators)
    }

    fn data_transfer(&self) -> Option<Arc<dyn DataTransfer>> {
        Some(self.transfer.clone())
    }

    fn streams(&self) -> Option<&dyn StreamSource> {
        Some(&self.streams)
    }
}

/// What users see of a GPU.
fn metadata(info: &DeviceInfo) -> Vec<(String, String)> {
    let (major, minor) = info.capability;
    let pairs = [
        ("cuda_device", info.ordinal.to_string()),
        ("name", info.name.clone()),
        ("compute_capability", format!("{major}.{minor}")),
        ("multiprocessors", info.multiprocessors.to_string()),
        ("memory_bytes", info.total_memory.to_string()),
    ];
    pairs.map(|(key, value)| (key.into(), value)).into()
}

/// Which of ORT's hardware devices each GPU is. ORT lists what the operating system shows, in containers often nothing:
/// a GPU that it does not know goes with the CPU.
fn places(hardware: &[HardwareDevice], gpus: &[&DeviceInfo]) -> Vec<Option<usize>> {
    let cpu = hardware.iter().position(|device| device.kind == DeviceKind::Cpu);
    let is_gpu = |device: &HardwareDevice| device.kind == DeviceKind::Gpu && device.vendor_id == VENDOR;
    let mut left: Vec<usize> = (0..hardware.len()).filter(|&i| is_gpu(&hardware[i])).collect();
    let mut found = vec![None; gpus.len()];
    // Both list a machine's GPUs in an order of their own, and CUDA perhaps not all: first those of the same model.
    for same_model in [true, false] {
        for (gpu, found) in gpus.iter().zip(&mut found).filter(|(_, found)| found.is_none()) {
            let fits = |&i: &usize| !same_model || hardware[i].device_id == gpu.pci_device_id;
            *found = left.iter().position(fits).map(|at| left.remove(at));
        }
    }
    found.into_iter().map(|found| found.or(cpu)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hardware(kind: DeviceKind, vendor_id: u32, device_id: u32) -> HardwareDevice {
        HardwareDevice { kind, vendor_id, device_id, vendor: String::new(), metadata: vec![] }
    }

    fn gpu(pci_device_id: u32) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "GPU".into(),
            capability: (9, 0),
            multiprocessors: 1,
            shared_limit: 0,
            total_memory: 0,
            l2_bytes: 0,
            pci_device_id,
        }
    }

    #[test]
    fn gpus_find_their_hardware() {
        let cpu = hardware(DeviceKind::Cpu, 0x8086, 1);
        let other = hardware(DeviceKind::Gpu, 0x1002, 0x2330);
        let [h200, a10] = [0x2335, 0x2236].map(|id| hardware(DeviceKind::Gpu, VENDOR, id));
        let of = |hardware: &[&HardwareDevice], gpus: &[u32]| {
            let hardware: Vec<_> = hardware.iter().map(|&device| device.clone()).collect();
            let gpus: Vec<_> = gpus.iter().map(|&id| gpu(id)).collect();
            places(&hardware, &gpus.iter().collect::<Vec<_>>())
        };
        assert_eq!(of(&[&cpu, &a10, &h200], &[0x2335, 0x2236]), [Some(2), Some(1)]);
        assert_eq!(of(&[&h200, &cpu, &h200], &[0x2335, 0x2335]), [Some(0), Some(2)]);
        assert_eq!(of(&[&cpu, &other, &h200], &[0x2335, 0x2335]), [Some(2), Some(0)], "the second is unknown to ORT");
        assert_eq!(of(&[&cpu, &a10], &[0x9999]), [Some(1)], "a number that differs");
        assert_eq!(of(&[&other, &cpu], &[0x2335]), [Some(1)]);
        assert_eq!(of(&[&other], &[0x2335]), [None]);
        assert!(of(&[&cpu], &[]).is_empty());
    }
}
