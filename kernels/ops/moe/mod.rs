//! com.microsoft MoE and QMoE:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.QMoE>.
//!
//! A router sends every token (H features) to `k` of E experts; an expert is two projections, or three, with I features
//! between them: `y = sum over the chosen of weight * (FC2 act(FC1 x + b1) + b2)`.

mod activation;
mod bank;
mod cpu;
mod cuda;
mod experts;
mod pack;
mod pass;
mod problem;
mod product;
mod route;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, ranked};
use abi::{DType, Dim, Result};
use problem::{INPUT, Problem, ROUTER, ROUTER_WEIGHTS, quantized, slots};

/// The definitions.
pub const OPS: &[OpDef] = &[define("MoE"), define("QMoE")];

const fn define(name: &'static str) -> OpDef {
    let def = OpDef::new("com.microsoft", name, (1, 1), claim, infer, build);
    def.with_cuda_claim(cuda::claim, cuda::build).with_cuda_experts(cuda::experts)
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let required = if quantized(cx) { [0, 1, 2, 5] } else { [0, 1, 2, 4] };
    for slot in required {
        if !cx.has_input(slot) {
            return Err(cx.decline(format_args!("input {slot}"), "nothing", "a tensor"));
        }
    }
    cx.check_dtype(INPUT, "input", &FLOATS)?;
    cx.check_dtype(ROUTER, "router_probs", &FLOATS)?;
    if quantized(cx) {
        claim_quantized(cx)?;
    }
    let dtype = cx.required(INPUT)?.dtype;
    for slots in slots(cx) {
        if !quantized(cx) {
            cx.check_dtype(slots.weights, &format!("{}_experts_weights", slots.name), &[dtype])?;
        }
        cx.check_dtype(slots.bias, &format!("{}_experts_bias", slots.name), &[dtype])?;
    }
    claim_activation(cx)?;
    if cx.int("use_sparse_mixer", 0) != 0 {
        cx.check_int("k", 1, &[2])?;
    }
    Problem::of(cx)?;
    Ok(check_router(cx)?)
}

/// The activation, and how its gate is stored.
fn claim_activation(cx: &NodeCx) -> Result<(), Decline> {
    let kinds = ["relu", "relu2", "gelu", "silu", "identity", "swiglu", "geglu"];
    cx.check_string("activation_type", "relu", &kinds)?;
    cx.check_int("swiglu_fusion", 0, &[0, 1, 2])?;
    cx.check_int("swiglu_limit_after_activation", 0, &[0, 1])?;
    let [.., fc3] = slots(cx);
    let (kind, fc3) = (cx.string("activation_type", "relu"), cx.has_input(fc3.weights));
    match (kind, fc3) {
        ("geglu", true) => Err(cx.decline("attribute 'activation_type'", "geglu with an FC3", "geglu without")),
        ("geglu", false) => cx.check_int("swiglu_fusion", 0, &[1, 2]),
        ("swiglu", false) => Ok(()),
        _ => cx.check_int("swiglu_fusion", 0, &[0]),
    }
}

/// Types and attributes that only QMoE has.
fn claim_quantized(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_string("quant_type", "int", &["int", "fp4", "nvfp4", "fp8"])?;
    cx.check_int("weights_prepacked", -1, &[-1, 0, 1])?;
    cx.check_dtype(ROUTER_WEIGHTS, "router_weights", &FLOATS)?;
    let names = ["fc1_act_scale", "fc2_act_scale", "fc1_act_block_scale", "fc2_act_block_scale"];
    for (slot, name) in (17..).zip(names) {
        cx.check_absent(slot, name, "activations are not quantised to FP8")?;
    }
    let quant = cx.string("quant_type", "int");
    let block = cx.int("block_size", 0);
    let (weights, scales, scaled): (DType, &[DType], bool) = match quant {
        "int" => (DType::U8, &FLOATS, true),
        "fp4" => (DType::U8, &[DType::F8E8M0], true),
        "nvfp4" => (DType::U8, &[DType::F8E4M3FN], true),
        _ => (DType::F8E4M3FN, &FLOATS, block > 0),
    };
    let global = quant == "fp4" || quant == "nvfp4" || (quant == "fp8" && block <= 0);
    for slots in slots(cx).into_iter().filter(|slots| cx.has_input(slots.weights)) {
        let name = |what: &str| format!("{}_{what}", slots.name);
        cx.check_dtype(slots.weights, &name("experts_weights"), &[weights])?;
        check_given(cx, slots.scales, &name("scales"), scaled, scales)?;
        check_given(cx, slots.global, &name("global_scale"), global, &[DType::F32])?;
        if global && slots.global.is_none() {
            let slot = format!("input {} ({})", slots.weights, name("experts_weights"));
            return Err(cx.decline(slot, "a tensor", "none: it has no global scale"));
        }
        if let Some(slot) = slots.zero_points {
            if quant != "int" {
                cx.check_absent(slot, &name("zero_points"), "only integers have them")?;
            }
            cx.check_dtype(slot, &name("zero_points"), &[DType::U8])?;
        }
    }
    if quant == "int" { claim_int(cx) } else { claim_block(cx, quant, block) }
}

/// An input that must be there, or must not.
fn check_given(cx: &NodeCx, slot: Option<usize>, name: &str, given: bool, types: &[DType]) -> Result<(), Decline> {
    let Some(slot) = slot else { return Ok(()) };
    if cx.has_input(slot) != given {
        let words = |given: bool| if given { "a tensor" } else { "nothing" };
        let expected = format!("{}, as 'quant_type' and 'block_size' have it", words(given));
        return Err(cx.decline(format_args!("input {slot} ({name})"), words(!given), expected));
    }
    cx.check_dtype(slot, name, types)
}

fn claim_block(cx: &NodeCx, quant: &str, block: i64) -> Result<(), Decline> {
    let fixed = match quant {
        "fp4" => 32,
        "nvfp4" => 16,
        _ => return Ok(()),
    };
    if block <= 0 {
        return Ok(());
    }
    cx.check_int("block_size", 0, &[fixed])
}

fn claim_int(cx: &NodeCx) -> Result<(), Decline> {
    let all = cx.int("expert_weight_bits", 4);
    let bits = slots(cx).map(|slots| {
        let name = format!("{}_expert_weight_bits", slots.name);
        (cx.int(&name, all), name)
    });
    for (got, name) in &bits {
        if ![2, 3, 4, 8].contains(got) {
            return Err(cx.decline(format_args!("attribute '{name}'"), got, "2, 3, 4 or 8"));
        }
    }
    let block = cx.int("block_size", 0);
    if block > 0 && (block < 16 || !(block as u64).is_power_of_two()) {
        return Err(cx.decline("attribute 'block_size'", block, "a power of two, 16 or more"));
    }
    let three = bits[..2].iter().any(|(bits, _)| *bits == 3);
    if three {
        cx.check_string("activation_type", "relu", &["swiglu"])?;
        cx.check_int("weights_prepacked", -1, &[0])?;
        cx.check_int("swiglu_fusion", 0, &[1])?;
        cx.check_int("block_size", 0, &[32, 64, 128])?;
    }
    Ok(())
}

/// Checks the router's shapes against the input's.
fn check_router(cx: &NodeCx) -> Result<()> {
    let input = cx.required(INPUT)?;
    let p = Problem::of(cx)?;
    let tokens = match &input.shape {
        None => Dim::Unknown,
        Some(shape) if shape.len() == 2 || shape.len() == 3 => {
            shape[..shape.len() - 1].iter().fold(Dim::Known(1), |all, dim| crate::fact::mul(&all, dim))
        }
        Some(shape) => return Err(cx.error("input 0 (input)", crate::shapes::show(shape), "rank 2 or 3")),
    };
    for (slot, name) in [(ROUTER, "router_probs"), (ROUTER_WEIGHTS, "router_weights")] {
        if slot == ROUTER || (quantized(cx) && cx.has_input(slot)) {
            let shape = ranked(cx, slot, name, 2)?;
            agree(cx, slot, name, 1, &shape[1], &Dim::Known(p.experts))?;
            // Products of symbols are unknown, and two names of one number may differ.
            if tokens.known().is_some() && shape[0].known().is_some() {
                agree(cx, slot, name, 0, &shape[0], &tokens)?;
            }
        }
    }
    Ok(())
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_router(cx)?;
    let input = cx.required(INPUT)?;
    Ok(vec![Fact::of(input.dtype, input.shape.clone())])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(cpu::build(cx)?))
}
