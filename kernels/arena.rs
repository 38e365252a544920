//! Offsets in one workspace for tensors that live at different times.

/// Hands out byte ranges of a workspace in execution order, reusing those given back.
#[derive(Debug, Default)]
pub struct Arena {
    /// Free ranges (offset, length), by offset, never adjacent.
    free: Vec<(usize, usize)>,
    end: usize,
}

impl Arena {
    /// Every range starts on a cache line.
    pub const ALIGN: usize = 64;

    /// A range of `bytes`; the smallest free one that fits, else new space.
    pub fn take(&mut self, bytes: usize) -> usize {
        let len = Self::rounded(bytes);
        if len == 0 {
            return 0;
        }
        let best = (0..self.free.len()).filter(|&i| self.free[i].1 >= len).min_by_key(|&i| self.free[i].1);
        if let Some(i) = best {
            let (offset, room) = self.free[i];
            if room == len {
                self.free.remove(i);
            } else {
                self.free[i] = (offset + len, room - len);
            }
            return offset;
        }
        // The last free range may touch the end: grow it instead of leaving a hole.
        let offset = match self.free.last() {
            Some(&(offset, room)) if offset + room == self.end => {
                self.free.pop();
                offset
            }
            _ => self.end,
        };
        self.end = offset + len;
        offset
    }

    /// Gives a range back; `bytes` as it was taken.
    pub fn give(&mut self, offset: usize, bytes: usize) {
        let len = Self::rounded(bytes);
        if len == 0 {
            return;
        }
        let at = self.free.partition_point(|&(o, _)| o < offset);
        self.free.insert(at, (offset, len));
        if at + 1 < self.free.len() && offset + len == self.free[at + 1].0 {
            self.free[at].1 += self.free[at + 1].1;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == offset {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
    }

    /// Bytes that a workspace needs.
    pub fn bytes(&self) -> usize {
        self.end
    }

    fn rounded(bytes: usize) -> usize {
        bytes.next_multiple_of(Self::ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::Arena;
    use proptest::prelude::*;

    #[test]
    fn a_returned_range_is_reused() {
        let mut arena = Arena::default();
        let a = arena.take(100);
        let b = arena.take(64);
        arena.give(a, 100);
        assert_eq!((arena.take(128), b), (a, 128));
        assert_eq!(arena.bytes(), 192);
    }

    #[test]
    fn an_empty_range_lies_in_no_other() {
        let mut arena = Arena::default();
        let a = arena.take(100);
        let empty = arena.take(0);
        arena.give(a, 100);
        let b = arena.take(72);
        assert!(empty <= b || b + 72 <= empty, "an empty range at {empty} lies within {b}+72");
        arena.give(empty, 0);
        assert_eq!((b, arena.bytes()), (0, 128));
    }

    proptest! {
        #[test]
        fn live_ranges_never_overlap(ops in prop::collection::vec((0usize..400, any::<bool>(), any::<prop::sample::Index>()), 1..60)) {
            let (mut arena, mut live) = (Arena::default(), Vec::<(usize, usize)>::new());
            for (bytes, give, which) in ops {
                if give && !live.is_empty() {
                    let (offset, bytes) = live.swap_remove(which.index(live.len()));
                    arena.give(offset, bytes);
                } else {
                    let offset = arena.take(bytes);
                    for &(o, b) in &live {
                        prop_assert!(offset + bytes <= o || o + b <= offset, "{offset}+{bytes} meets {o}+{b}");
                    }
                    prop_assert!(offset + bytes <= arena.bytes() && offset % Arena::ALIGN == 0);
                    live.push((offset, bytes));
                }
            }
        }
    }
}
