//! The ops. Two lines an op: the module and its definitions.

use crate::op::OpDef;

mod causal_conv;
mod group_query_attention;
mod identity;
mod linear_attention;
mod linear_attention_gate;
mod norm;
mod rotary_embedding;
mod silu_mul;

/// Every definition.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    [
        causal_conv::OPS,
        group_query_attention::OPS,
        identity::OPS,
        linear_attention::OPS,
        linear_attention_gate::OPS,
        norm::gated::OPS,
        norm::layer::OPS,
        norm::lp::OPS,
        norm::skip::OPS,
        rotary_embedding::OPS,
        silu_mul::OPS,
    ]
    .into_iter()
    .flatten()
}
