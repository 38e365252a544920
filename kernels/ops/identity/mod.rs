//! ai.onnx Identity: <https://onnx.ai/onnx/operators/onnx__Identity.html>.

use crate::build::BuildCx;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use abi::Result;

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("", "Identity", (1, u32::MAX), claim, infer, build).with_view()];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    Ok(vec![Fact { value: input.value.clone(), ..input.with_dtype(input.dtype) }])
}

fn build(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Copy))
}

/// Copies input 0's bytes to output 0: what a view op does where it may not be a view.
pub struct Copy;

impl Kernel for Copy {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let from = cx.required(0);
        if let Some(mut to) = cx.output(0) {
            to.bytes().copy_from_slice(from.bytes());
        }
        Ok(())
    }
}
