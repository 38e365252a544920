//! The ops. Two lines an op: the module and its definitions.

use crate::op::OpDef;

mod arg;
mod attention;
mod bias_gelu;
mod cast;
mod causal_conv;
mod compress;
mod conv;
mod cumulative;
mod elementwise;
mod gated_add;
mod gated_delta_net;
mod gather;
mod gather_block_quantized;
pub(crate) mod group_query_attention;
mod identity;
pub(crate) mod linear_attention;
mod linear_attention_gate;
mod matmul;
mod matmul_nbits;
mod moe;
mod moe_group_router;
mod movement;
mod norm;
mod one_hot;
mod pad;
mod range;
mod reduce;
pub(crate) mod rotary_embedding;
pub(crate) mod scan;
mod scatter;
mod shape;
mod silu_mul;
mod softmax;
mod tensor_scatter;
mod top_k;
mod trilu;

#[cfg(test)]
mod testing;

/// Every definition.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    [
        arg::OPS,
        attention::OPS,
        bias_gelu::OPS,
        cast::OPS,
        causal_conv::OPS,
        compress::OPS,
        conv::OPS,
        cumulative::OPS,
        elementwise::binary::IRREGULAR,
        elementwise::binary::OPS,
        elementwise::pow::OPS,
        elementwise::select::OPS,
        elementwise::swiglu::OPS,
        elementwise::unary::IRREGULAR,
        elementwise::unary::OPS,
        elementwise::variadic::OPS,
        gated_add::OPS,
        gated_delta_net::OPS,
        gather::OPS,
        gather_block_quantized::OPS,
        group_query_attention::OPS,
        identity::OPS,
        linear_attention::OPS,
        linear_attention_gate::OPS,
        matmul::OPS,
        matmul_nbits::OPS,
        moe::OPS,
        moe_group_router::OPS,
        movement::concat::OPS,
        movement::slice::OPS,
        movement::split::OPS,
        movement::strided::OPS,
        norm::gated::OPS,
        norm::layer::OPS,
        norm::lp::OPS,
        norm::skip::OPS,
        one_hot::OPS,
        pad::OPS,
        range::OPS,
        reduce::OPS,
        rotary_embedding::OPS,
        scan::OPS,
        scatter::OPS,
        shape::constant::OPS,
        shape::reshape::OPS,
        shape::size::OPS,
        shape::squeeze::OPS,
        silu_mul::OPS,
        softmax::OPS,
        tensor_scatter::OPS,
        top_k::OPS,
        trilu::OPS,
    ]
    .into_iter()
    .flatten()
}
