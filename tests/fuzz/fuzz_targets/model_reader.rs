//! Any bytes as a model file: the reader, function expansion and the claim may refuse them, but never panic.

#![no_main]

use abi::onnx::Model;
use kernels::claim::claim;
use kernels::settings::Settings;
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;

fn read(bytes: &[u8]) -> abi::Result<()> {
    let mut model = Model::from_bytes(bytes)?;
    loop {
        claim(&model.graph()?, &Settings::default());
        if !model.inline(&HashSet::new())? {
            return Ok(());
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = read(bytes);
});
