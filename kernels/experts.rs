//! How many experts of a node lie in device memory, where not all experts of a session fit.

use crate::op::NodeLabel;
use abi::{Error, Result};

/// The option that bounds them.
pub const OPTION: &str = "expert_memory_limit_bytes";

/// The experts of one node, packed for the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Experts that one token goes to: as many must be on the device at once.
    pub top: usize,
    /// Bytes of one.
    pub bytes: usize,
}

/// What a session's experts may take of device memory, and what all of them would. Every node gets the same part of its
/// experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    limit: usize,
    total: usize,
}

impl Share {
    /// For a session of these nodes; `None` when all their experts fit `limit` bytes (0: no limit).
    ///
    /// # Errors
    /// When a token would not find room for its experts.
    pub fn of(limit: usize, nodes: &[(NodeLabel, Experts)]) -> Result<Option<Self>> {
        let total = nodes.iter().map(|(_, experts)| experts.count * experts.bytes).sum();
        if limit == 0 || total <= limit {
            return Ok(None);
        }
        let share = Self { limit, total };
        let Some((label, experts)) = nodes.iter().find(|(_, experts)| share.slots(experts) < experts.top) else {
            return Ok(Some(share));
        };
        let least = nodes.iter().map(|(_, experts)| (total * experts.top).div_ceil(experts.count)).max().unwrap_or(0);
        let (slots, top) = (share.slots(experts), experts.top);
        Err(Error::Option {
            name: OPTION.into(),
            got: limit.to_string(),
            expected: format!(
                "at least {least} for this model, or 0: {label} would have {slots} experts on the device, and its tokens go \
                 to {top}"
            ),
        })
    }

    /// Experts of a node that are on the device at once: fewer than it has.
    pub fn slots(&self, experts: &Experts) -> usize {
        let slots = experts.count as u128 * self.limit as u128 / self.total as u128;
        usize::try_from(slots).expect("the limit is less than the total")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(count: usize, top: usize, bytes: usize) -> (NodeLabel, Experts) {
        let label = NodeLabel { node: format!("of {count}"), op: "QMoE".into() };
        (label, Experts { count, top, bytes })
    }

    #[test]
    fn every_node_gets_its_part() {
        let nodes = [node(8, 2, 1000), node(4, 1, 500)];
        assert_eq!(Share::of(0, &nodes), Ok(None));
        assert_eq!(Share::of(10_000, &nodes), Ok(None));
        let slots = |limit| {
            let share = Share::of(limit, &nodes).expect("enough").expect("too little for all");
            nodes.each_ref().map(|(_, experts)| share.slots(experts))
        };
        assert_eq!([slots(9999), slots(8750), slots(5000), slots(2500)], [[7, 3], [7, 3], [4, 2], [2, 1]]);
        let error = Share::of(2499, &nodes).expect_err("too little").to_string();
        assert!(error.contains("at least 2500") && error.contains("'of 8'"), "{error}");
        let one = [node(7, 3, 999)];
        for slots in 3..7 {
            let share = Share::of(slots * 999, &one).expect("enough").expect("too little for all");
            assert_eq!(share.slots(&one[0].1), slots);
        }
    }
}
