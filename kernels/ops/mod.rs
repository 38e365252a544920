//! The ops. Two lines an op: the module and its definitions.

use crate::op::OpDef;

mod identity;

/// Every definition.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    [identity::OPS].into_iter().flatten()
}
