//! Which experts lie in a node's slots, and in what portions a Run takes more of them than there are slots.

use std::ops::Range;

/// A cache of experts: when a slot is needed, the one whose expert was used longest ago gets another.
pub(super) struct Slots {
    /// By slot: the expert in it.
    held: Vec<Option<u32>>,
    /// By slot: when its expert was last used.
    used: Vec<u64>,
    /// By expert: its slot.
    places: Vec<Option<u32>>,
    now: u64,
}

/// An expert that is to be brought into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Missing {
    pub expert: usize,
    pub slot: usize,
}

impl Slots {
    /// `slots` slots that hold the first of `experts` experts.
    pub fn new(experts: usize, slots: usize) -> Self {
        let first = || (0..slots as u32).map(Some);
        let mut places: Vec<_> = first().collect();
        places.resize(experts, None);
        Self { held: first().collect(), used: vec![0; slots], places, now: 0 }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Where an expert is.
    pub fn place(&self, expert: u32) -> Option<u32> {
        self.places[expert as usize]
    }

    /// By slot: its expert, or 0 where there is none.
    pub fn held(&self) -> impl Iterator<Item = u32> + '_ {
        self.held.iter().map(|expert| expert.unwrap_or(0))
    }

    /// Gives each of `wanted`, distinct experts and no more than there are slots, a slot; says what must be brought.
    pub fn bring(&mut self, wanted: &[u32]) -> Vec<Missing> {
        self.now += 1;
        for &expert in wanted {
            if let Some(slot) = self.place(expert) {
                self.used[slot as usize] = self.now;
            }
        }
        let absent = wanted.iter().filter(|&&expert| self.place(expert).is_none()).copied().collect::<Vec<_>>();
        absent.into_iter().map(|expert| self.replace(expert)).collect()
    }

    fn replace(&mut self, expert: u32) -> Missing {
        let slot = (0..self.len()).min_by_key(|&slot| self.used[slot]).expect("a node has slots");
        debug_assert!(self.used[slot] < self.now, "more experts at once than slots");
        if let Some(old) = self.held[slot].replace(expert) {
            self.places[old as usize] = None;
        }
        self.places[expert as usize] = Some(slot as u32);
        self.used[slot] = self.now;
        Missing { expert: expert as usize, slot }
    }

    /// Forgets what is where.
    pub fn clear(&mut self) {
        self.held.fill(None);
        self.places.fill(None);
        self.used.fill(0);
    }

    /// The tokens of `ids`, `top` each, in stretches whose experts have slots together.
    pub fn stretches(&self, ids: &[u32], top: usize) -> Vec<Range<usize>> {
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for token in 0..ids.len() / top {
            let grown = |last: &Range<usize>| distinct(&ids[last.start * top..(token + 1) * top]).len() <= self.len();
            match stretches.last_mut() {
                Some(last) if grown(last) => last.end = token + 1,
                _ => stretches.push(token..token + 1),
            }
        }
        stretches
    }

    /// The experts among `ids` in portions that have slots together; those that have one already come first.
    pub fn portions(&self, ids: &[u32]) -> Vec<Vec<u32>> {
        let mut experts = distinct(ids);
        experts.sort_by_key(|&expert| (self.place(expert).is_none(), expert));
        experts.chunks(self.len()).map(<[u32]>::to_vec).collect()
    }
}

/// Each number of `ids` once, in rising order.
pub(super) fn distinct(ids: &[u32]) -> Vec<u32> {
    let mut all = ids.to_vec();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_least_recently_used_go() {
        let mut slots = Slots::new(6, 3);
        assert_eq!(slots.bring(&[0, 2]), []);
        // 1 was never used.
        assert_eq!(slots.bring(&[4]), [Missing { expert: 4, slot: 1 }]);
        assert_eq!(slots.bring(&[2]), []);
        assert_eq!(slots.bring(&[1, 4]), [Missing { expert: 1, slot: 0 }]);
        assert_eq!(slots.held().collect::<Vec<_>>(), [1, 4, 2]);
        slots.clear();
        assert_eq!(slots.bring(&[5, 2, 0]).len(), 3);
    }

    #[test]
    fn tokens_and_experts_are_cut_to_the_slots() {
        let slots = Slots::new(8, 3);
        assert_eq!(slots.stretches(&[0, 1, 1, 2, 2, 0, 0, 3, 3, 4, 5, 6], 2), [0..3, 3..5, 5..6]);
        assert_eq!(slots.portions(&[7, 1, 4, 7, 6, 2, 1]), [vec![1, 2, 4], vec![6, 7]]);
    }

    proptest! {
        #[test]
        fn wanted_experts_have_slots_of_their_own(
            steps in prop::collection::vec(prop::collection::btree_set(0u32..9, 1..=4), 1..30),
            count in 4usize..9,
        ) {
            let mut slots = Slots::new(9, count);
            for wanted in steps {
                let wanted: Vec<_> = wanted.into_iter().collect();
                let before: Vec<_> = wanted.iter().map(|&e| slots.place(e)).collect();
                let missing = slots.bring(&wanted);
                prop_assert_eq!(missing.len(), before.iter().filter(|place| place.is_none()).count());
                let mut places: Vec<_> = wanted.iter().map(|&e| slots.place(e).expect("it has one")).collect();
                // Those that were there stay where they were.
                prop_assert!(before.iter().zip(&places).all(|(old, new)| old.is_none_or(|old| old == *new)));
                for (&expert, &slot) in wanted.iter().zip(&places) {
                    prop_assert_eq!(slots.held().nth(slot as usize), Some(expert));
                }
                places.sort_unstable();
                places.dedup();
                prop_assert_eq!(places.len(), wanted.len());
            }
        }
    }
}
