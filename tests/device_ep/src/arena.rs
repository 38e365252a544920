//! The device's memory: addresses that fault when the host touches them, and the bytes behind them.

use crate::stream::{Ticket, live_tickets};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock};

/// Bytes of device memory; only touched pages take real memory.
const SIZE: usize = 256 << 20;
/// Every block starts at a multiple of this and is one long at least.
const ALIGN: usize = 256;
/// What fresh blocks hold: an absurd float (-1.3e9), int64 and bool alike.
const POISON: u8 = 0xCE;

/// Device memory with a pool. A block goes back to use only when all work that might touch it is done.
pub struct Arena {
    /// Start of the address range that faults.
    device: usize,
    /// Start of the same range's bytes.
    shadow: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// First byte never handed out.
    top: usize,
    /// Live blocks: offset to size.
    live: BTreeMap<usize, usize>,
    /// Freed blocks: offset, size, and the work that may still touch them.
    freed: Vec<(usize, usize, Vec<Ticket>)>,
}

/// The one device's memory.
pub fn arena() -> &'static Arena {
    static ARENA: OnceLock<Arena> = OnceLock::new();
    ARENA.get_or_init(|| {
        let map = |protection| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, flags, -1, 0) };
            assert!(at != libc::MAP_FAILED, "no address space for the emulated device");
            at.addr()
        };
        Arena { device: map(libc::PROT_NONE), shadow: map(libc::PROT_READ | libc::PROT_WRITE), state: Mutex::default() }
    })
}

impl Arena {
    /// A poisoned block of `size` bytes; `None` when the device is full.
    pub fn alloc(&self, size: usize) -> Option<NonNull<u8>> {
        let size = size.checked_next_multiple_of(ALIGN)?;
        let mut state = self.state.lock().expect("no panic while locked");
        let reusable = |(_, room, work): &(usize, usize, Vec<Ticket>)| *room == size && work.iter().all(Ticket::done);
        let at = match state.freed.iter().position(reusable) {
            Some(i) => state.freed.swap_remove(i).0,
            None if size <= SIZE - state.top => {
                state.top += size;
                state.top - size
            }
            None => return None,
        };
        state.live.insert(at, size);
        // SAFETY: the block lies in the shadow mapping, and no work uses it.
        unsafe { std::ptr::write_bytes((self.shadow + at) as *mut u8, POISON, size) };
        NonNull::new((self.device + at) as *mut u8)
    }

    /// Takes a block back; false when there is none at `ptr`.
    pub fn free(&self, ptr: NonNull<u8>) -> bool {
        let mut state = self.state.lock().expect("no panic while locked");
        let at = ptr.addr().get().wrapping_sub(self.device);
        match state.live.remove(&at) {
            Some(size) => {
                state.freed.push((at, size, live_tickets()));
                true
            }
            None => false,
        }
    }

    /// Number of live blocks.
    pub fn live(&self) -> usize {
        self.state.lock().expect("no panic while locked").live.len()
    }

    /// The bytes behind device addresses; panics when the range is not wholly in one block that is live, or was when
    /// this work was queued.
    fn shadow_of(&self, ptr: *const u8, len: usize) -> *mut u8 {
        let at = ptr.addr().wrapping_sub(self.device);
        let state = self.state.lock().expect("no panic while locked");
        let block = state.live.range(..=at).next_back();
        let freed = state.freed.iter().map(|(start, size, _)| (start, size)).find(|&(s, n)| (*s..s + n).contains(&at));
        let inside = [block, freed].into_iter().flatten().any(|(s, n)| at >= *s && at + len <= s + n);
        assert!(inside || len == 0, "device address {ptr:p}..+{len} is in no block");
        (self.shadow + at) as *mut u8
    }

    /// Reads device memory.
    pub fn read(&self, ptr: *const u8, len: usize) -> Vec<u8> {
        let from = self.shadow_of(ptr, len);
        // SAFETY: inside a live block; its owner orders reads and writes by streams.
        if len == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(from, len) }.to_vec() }
    }

    /// Writes device memory.
    pub fn write(&self, ptr: *mut u8, bytes: &[u8]) {
        let to = self.shadow_of(ptr, bytes.len());
        if !bytes.is_empty() {
            // SAFETY: inside a live block; its owner orders reads and writes by streams.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }
}
