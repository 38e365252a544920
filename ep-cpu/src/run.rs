//! One Run: ORT's kernel context as the plan's inputs, outputs and threads.

use abi::ort::{Compiled, Context, Input};
use abi::{DType, Error, Result};
use kernels::plan::{Io, Plan};

/// A compiled group.
pub struct CompiledPlan(pub Plan);

impl Compiled for CompiledPlan {
    fn run(&self, context: &Context<'_>) -> Result<()> {
        let inputs = (0..context.input_count()).map(|i| context.input(i)).collect::<Result<Vec<_>>>()?;
        self.0.run(&mut RunIo { context, inputs }, context)
    }
}

struct RunIo<'a> {
    context: &'a Context<'a>,
    inputs: Vec<Input<'a>>,
}

impl Io for RunIo<'_> {
    fn input(&self, i: usize) -> Result<(DType, &[usize], *const u8)> {
        let input = &self.inputs[i];
        Ok((input.dtype, input.shape, input.data))
    }

    fn output(&mut self, j: usize, dtype: DType, shape: &[usize]) -> Result<*mut u8> {
        let output = self.context.output(j, shape)?;
        if output.dtype != dtype {
            return Err(Error::Internal(format!("output {j}: ORT expects {}, the plan makes {dtype}", output.dtype)));
        }
        Ok(output.data)
    }
}
