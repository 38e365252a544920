//! An EP for tests: it runs Add and Mul on float tensors, on a device that is emulated in host memory.
//!
//! Device addresses fault when the host touches them, fresh memory is poisoned, and streams are slow, so that a missing
//! copy or a missing wait shows. [`report`] counts what ORT called. Failures can be injected: in a session with the
//! options `fail_at` and `panic_at`, at registration by a registered name that ends in `fail=<callback>`.

mod arena;
mod dump;
mod ep;
mod graphs;
mod memory;
pub mod report;
mod stream;

use abi::options::{Kind, OptionDef, Options};
use abi::ort::{
    AllocatorSource, DataTransfer, Device, DeviceKind, Ep, Factory, HardwareDevice, Logger, MemoryInfo, MemoryKind,
    Registration, SessionOptions, StreamSource,
};
use abi::{Error, Result};
use std::sync::Arc;

abi::export_factory!(make);

/// Callbacks of a session that can be made to fail.
const STAGES: &[&str] =
    &["none", "create_ep", "claim", "compile", "second_compile", "run", "task", "run_start", "run_end"];

/// The options of a session.
const OPTIONS: &[OptionDef] = &[
    OptionDef { name: "dump", kind: Kind::Text, default: "", help: "Folder for each graph of a claim or compile." },
    OptionDef { name: "fail_at", kind: Kind::Choice(STAGES), default: "none", help: "Callback that returns an error." },
    OptionDef { name: "panic_at", kind: Kind::Choice(STAGES), default: "none", help: "Callback that panics." },
    OptionDef { name: "concurrent", kind: Kind::Bool, default: "1", help: "Whether Runs may overlap." },
    OptionDef { name: "ops", kind: Kind::Choice(&["both", "Add", "Mul"]), default: "both", help: "What is claimed." },
    OptionDef { name: "memcpy", kind: Kind::Bool, default: "0", help: "Whether Memcpy nodes are the EP's." },
    OptionDef { name: "graphs", kind: Kind::Bool, default: "0", help: "Whether ORT may capture and replay Runs." },
    OptionDef { name: "own_memory", kind: Kind::Bool, default: "0", help: "Allocators and streams of the session." },
    OptionDef { name: "fuse", kind: Kind::Bool, default: "1", help: "Whether neighbours are claimed as one group." },
];

fn make(registration: &Registration) -> Result<Box<dyn Factory>> {
    let (_, fail) = registration.registered_name.split_once("fail=").unwrap_or_default();
    let factory = DeviceFactory {
        name: registration.ep_name("DeviceTestExecutionProvider"),
        fail: fail.to_owned(),
        source: memory::Source { fail: fail == "CreateAllocator" },
        // Names with "sync" in them give an EP without streams.
        streams: (!registration.registered_name.contains("sync")).then_some(stream::Streams),
    };
    factory.inject("CreateEpFactories")?;
    Ok(Box::new(factory))
}

struct DeviceFactory {
    name: String,
    fail: String,
    source: memory::Source,
    streams: Option<stream::Streams>,
}

impl DeviceFactory {
    fn inject(&self, callback: &str) -> Result<()> {
        match self.fail == callback {
            true => Err(Error::Internal(format!("injected failure in {callback}"))),
            false => Ok(()),
        }
    }
}

impl Factory for DeviceFactory {
    fn name(&self) -> &str {
        &self.name
    }

    fn vendor(&self) -> &str {
        "nxrt tests"
    }

    fn vendor_id(&self) -> u32 {
        memory::VENDOR
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    /// The device's memories hang on the CPU hardware device, so no machine lacks it.
    fn devices(&self, hardware: &[HardwareDevice]) -> Result<Vec<Device>> {
        self.inject("GetSupportedDevices")?;
        if self.fail == "panic" {
            panic!("injected panic in GetSupportedDevices");
        }
        let Some(cpu) = hardware.iter().position(|device| device.kind == DeviceKind::Cpu) else {
            return Ok(Vec::new());
        };
        let memory = [("device_ep", MemoryKind::Default), ("device_ep_pinned", MemoryKind::HostAccessible)];
        let memory =
            memory.map(|(name, kind)| MemoryInfo { name: name.into(), device: memory::place(kind), alignment: 0 });
        Ok(vec![Device {
            hardware: cpu,
            metadata: vec![("emulated".into(), "1".into())],
            options: vec![("concurrent".into(), "1".into())],
            memory: memory.into(),
        }])
    }

    fn create_ep(&self, session: &SessionOptions, logger: Logger) -> Result<Box<dyn Ep>> {
        let options = Options::parse(OPTIONS, &[], session.provider(&self.name))?;
        let ep = ep::DeviceEp::new(options, logger);
        ep.inject("create_ep")?;
        Ok(Box::new(ep))
    }

    fn allocators(&self) -> Option<&dyn AllocatorSource> {
        Some(&self.source)
    }

    fn data_transfer(&self) -> Option<Arc<dyn DataTransfer>> {
        Some(Arc::new(memory::Transfer))
    }

    fn streams(&self) -> Option<&dyn StreamSource> {
        self.streams.as_ref().map(|streams| streams as _)
    }
}
