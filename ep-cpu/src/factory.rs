//! One EP device for the host's CPU.

use crate::ep::CpuEp;
use crate::options;
use abi::Result;
use abi::ort::{Device, DeviceKind, Ep, Factory, HardwareDevice, Logger, Registration, SessionOptions};

/// The name that the EP goes by unless the user registers another.
pub const EP_NAME: &str = "NxrtCpuExecutionProvider";

/// Called by ORT when the library is registered.
pub fn create(registration: &Registration) -> Result<Box<dyn Factory>> {
    Ok(Box::new(CpuFactory { name: registration.ep_name(EP_NAME) }))
}

struct CpuFactory {
    name: String,
}

impl Factory for CpuFactory {
    fn name(&self) -> &str {
        &self.name
    }

    fn vendor(&self) -> &str {
        "nxrt"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn devices(&self, hardware: &[HardwareDevice]) -> Result<Vec<Device>> {
        let cpu = hardware.iter().position(|h| h.kind == DeviceKind::Cpu);
        Ok(cpu.map(|hardware| Device { hardware, ..Device::default() }).into_iter().collect())
    }

    fn create_ep(&self, session: &SessionOptions, logger: Logger) -> Result<Box<dyn Ep>> {
        let settings = options::settings(session.provider(&self.name))?;
        Ok(Box::new(CpuEp::new(settings, logger)))
    }
}
