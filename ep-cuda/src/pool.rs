//! A caching pool of device or pinned memory.
//!
//! A freed block serves its own stream again at once, since the stream does one thing after the other. Another stream,
//! or work without a stream, gets it when what was queued at the time of the free is done.

use crate::timeline::{Marks, Point, StreamKey, Timeline};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smallest block; all addresses are multiples of it.
pub const SMALLEST: usize = 512;
/// Blocks up to this size are carved out of slabs.
const SMALL: usize = 256 << 10;
/// Size of a slab.
const SLAB: usize = 2 << 20;
/// From here on sizes are finer, since a device has room for few blocks of them.
const HUGE: usize = 64 << 20;

/// Where the pool's memory comes from.
pub trait Source: Send + Sync {
    /// `bytes` of memory, at a multiple of [`SMALLEST`]; `None` when there is no room.
    fn take(&self, bytes: usize) -> Option<usize>;

    /// Takes back what [`Self::take`] gave. No work uses it.
    fn give(&self, address: usize, bytes: usize);
}

/// What a pool does with streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Streams alone touch the memory.
    Device,
    /// The host touches the memory too, right after it got it: all earlier work on the block must be done.
    Host,
}

/// Figures since the pool was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks handed out.
    pub allocs: usize,
    /// Blocks handed out past the pool.
    pub reserves: usize,
    /// Bytes handed out at present, and the most ever.
    pub in_use: usize,
    /// The most bytes handed out ever.
    pub max_in_use: usize,
    /// The largest block ever handed out.
    pub largest: usize,
    /// Bytes held from the source.
    pub held: usize,
    /// How often the source gave memory.
    pub extensions: usize,
    /// How often memory went back to it.
    pub shrinkages: usize,
}

/// The pool.
pub struct Pool<M: Source, T: Marks> {
    source: M,
    timeline: Arc<Timeline<T>>,
    kind: Kind,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: HashMap<usize, Live>,
    /// Blocks handed out ever.
    serial: u64,
    /// Free blocks by size, the latest last.
    free: BTreeMap<usize, Vec<Free>>,
    slabs: HashMap<usize, Slab>,
    /// The slab that blocks are carved out of, and how much of it is carved.
    carving: Option<(usize, usize)>,
    stats: Stats,
}

struct Live {
    size: usize,
    /// Tells this block from others that were or will be at its address.
    serial: u64,
    stream: Option<StreamKey>,
    home: Home,
}

struct Free {
    address: usize,
    home: Home,
    /// What must be done before just anybody may have the block.
    points: Vec<Point>,
}

/// What a block is part of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Slab(usize),
    Own,
    Reserved,
}

#[derive(Default)]
struct Slab {
    live: usize,
}

/// The block size for a request: four sizes an octave, sixteen for huge ones. `None` on overflow.
pub fn block_size(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(SMALLEST);
    let octave = 1usize << bytes.ilog2();
    let step = if bytes > HUGE { octave / 16 } else { octave / 4 };
    bytes.checked_next_multiple_of(step.max(SMALLEST))
}

impl<M: Source, T: Marks> Pool<M, T> {
    /// An empty pool.
    pub fn new(source: M, timeline: Arc<Timeline<T>>, kind: Kind) -> Self {
        Self { source, timeline, kind, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the memory comes from.
    pub fn source(&self) -> &M {
        &self.source
    }

    /// Figures.
    pub fn stats(&self) -> Stats {
        self.state().stats
    }

    /// A block of at least `bytes` for work on `stream`; `None` when there is no room even after all that is free was
    /// given back.
    pub fn alloc(&self, bytes: usize, stream: Option<StreamKey>) -> Option<usize> {
        let size = block_size(bytes)?;
        let stream = stream.filter(|_| self.kind == Kind::Device);
        let mut state = self.state();
        let (address, size, home) = match self.reuse(&mut state, size, stream) {
            Some(found) => found,
            None => self.fresh(&mut state, size).or_else(|| {
                // Rather wait for other streams than fail.
                self.settle(&mut state);
                self.reuse(&mut state, size, stream).or_else(|| self.fresh(&mut state, size))
            })?,
        };
        if let Home::Slab(slab) = home {
            state.slabs.get_mut(&slab).expect("a block's slab is there").live += 1;
        }
        state.stats.allocs += 1;
        state.hand_out(address, size, stream, home);
        Some(address)
    }

    /// Memory that stays for long, past the pool.
    pub fn reserve(&self, bytes: usize) -> Option<usize> {
        let size = bytes.checked_next_multiple_of(SMALLEST)?;
        let mut state = self.state();
        let address = self.take(&mut state, size).or_else(|| {
            self.settle(&mut state);
            self.take(&mut state, size)
        })?;
        state.stats.reserves += 1;
        state.hand_out(address, size, None, Home::Reserved);
        Some(address)
    }

    /// Takes a block back; false when there is none at this address.
    pub fn free(&self, address: usize) -> bool {
        let mut state = self.state();
        let Some(Live { size, stream, home, .. }) = state.live.remove(&address) else {
            return false;
        };
        state.stats.in_use -= size;
        let points = match stream {
            Some(stream) => self.timeline.point(stream).into_iter().collect(),
            None => self.timeline.points(),
        };
        match home {
            Home::Reserved => match points.iter().all(|point| self.timeline.wait(point)) {
                true => self.give(&mut state, address, size),
                false => state.free.entry(size).or_default().push(Free { address, home: Home::Own, points }),
            },
            Home::Slab(slab) => {
                state.slabs.get_mut(&slab).expect("a block's slab is there").live -= 1;
                state.free.entry(size).or_default().push(Free { address, home, points });
            }
            Home::Own => state.free.entry(size).or_default().push(Free { address, home, points }),
        }
        true
    }

    /// For each address a number that is another one once its block has been freed, even when the address is in use again;
    /// `None` where no block begins.
    pub fn serials(&self, addresses: &[u64]) -> Vec<Option<u64>> {
        let state = self.state();
        let serial = |&address: &u64| state.live.get(&usize::try_from(address).ok()?).map(|live| live.serial);
        addresses.iter().map(serial).collect()
    }

    /// Gives memory that nobody has back to the source, after waiting for the work that still uses it.
    pub fn shrink(&self) {
        self.settle(&mut self.state());
    }

    /// A free block of this size, or for large ones of up to half as much again.
    fn reuse(&self, state: &mut State, size: usize, stream: Option<StreamKey>) -> Option<(usize, usize, Home)> {
        let largest = if size > SMALL { size + size / 2 } else { size };
        let own = |free: &Free| free.points.iter().all(|point| Some(point.stream) == stream);
        let ready = |free: &Free| {
            let over = |point: &Point| Some(point.stream) == stream || self.timeline.passed(point);
            free.points.iter().all(over)
        };
        for (&size, blocks) in state.free.range_mut(size..=largest) {
            let found = blocks.iter().rposition(own).or_else(|| blocks.iter().position(ready));
            if let Some(i) = found {
                let Free { address, home, .. } = blocks.remove(i);
                return Some((address, size, home));
            }
        }
        None
    }

    /// A block of this size out of a slab or of the source's.
    fn fresh(&self, state: &mut State, size: usize) -> Option<(usize, usize, Home)> {
        if size > SMALL {
            return self.take(state, size).map(|address| (address, size, Home::Own));
        }
        let (slab, carved) = match state.carving {
            Some((slab, carved)) if SLAB - carved >= size => (slab, carved),
            _ => {
                let slab = self.take(state, SLAB)?;
                state.slabs.insert(slab, Slab::default());
                (slab, 0)
            }
        };
        state.carving = Some((slab, carved + size));
        Some((slab + carved, size, Home::Slab(slab)))
    }

    /// Memory of the source; gives back what is free when there is no room.
    fn take(&self, state: &mut State, size: usize) -> Option<usize> {
        let taken = self.source.take(size).or_else(|| {
            self.release(state);
            self.source.take(size)
        })?;
        state.stats.held += size;
        state.stats.extensions += 1;
        Some(taken)
    }

    fn give(&self, state: &mut State, address: usize, size: usize) {
        state.stats.held -= size;
        state.stats.shrinkages += 1;
        self.source.give(address, size);
    }

    /// Waits for all work on freed blocks, and gives them back.
    fn settle(&self, state: &mut State) {
        let points = state.free.values().flatten().flat_map(|free| &free.points);
        for point in points {
            self.timeline.wait(point);
        }
        self.release(state);
    }

    /// Gives back all blocks and slabs that no work uses.
    fn release(&self, state: &mut State) {
        let done = |free: &Free| free.points.iter().all(|point| self.timeline.passed(point));
        let mut own = Vec::new();
        let mut busy: Vec<usize> = Vec::new();
        for (&size, blocks) in &mut state.free {
            blocks.retain(|free| match (free.home, done(free)) {
                (Home::Slab(slab), false) => {
                    busy.push(slab);
                    true
                }
                (Home::Slab(_), true) | (_, false) => true,
                (_, true) => {
                    own.push((free.address, size));
                    false
                }
            });
        }
        own.into_iter().for_each(|(address, size)| self.give(state, address, size));
        let idle = state.slabs.iter().filter(|(at, slab)| slab.live == 0 && !busy.contains(at));
        let idle: Vec<usize> = idle.map(|(&at, _)| at).collect();
        for blocks in state.free.values_mut() {
            blocks.retain(|free| !matches!(free.home, Home::Slab(slab) if idle.contains(&slab)));
        }
        for slab in idle {
            state.slabs.remove(&slab);
            state.carving = state.carving.filter(|&(at, _)| at != slab);
            self.give(state, slab, SLAB);
        }
        state.free.retain(|_, blocks| !blocks.is_empty());
    }
}

impl State {
    fn hand_out(&mut self, address: usize, size: usize, stream: Option<StreamKey>, home: Home) {
        let stats = &mut self.stats;
        stats.in_use += size;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.largest = stats.largest.max(size);
        self.serial += 1;
        self.live.insert(address, Live { size, serial: self.serial, stream, home });
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
