//! The ring over a lane that copies as late as it may.

use super::*;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};

/// Host memory at device addresses; copies are done when somebody waits for them.
struct LateLane {
    device: RefCell<Vec<u8>>,
    queue: RefCell<VecDeque<Copy>>,
    queued: Cell<usize>,
    done: Cell<usize>,
}

enum Copy {
    Up(u64, *const u8, usize),
    Down(*mut u8, u64, usize),
}

impl LateLane {
    fn new(device: Vec<u8>) -> Self {
        Self { device: device.into(), queue: RefCell::default(), queued: Cell::new(0), done: Cell::new(0) }
    }

    fn queue(&self, copy: Copy) {
        self.queued.set(self.queued.get() + 1);
        self.queue.borrow_mut().push_back(copy);
    }

    fn work_until(&self, mark: usize) {
        let mut device = self.device.borrow_mut();
        while self.done.get() < mark {
            self.done.set(self.done.get() + 1);
            let copy = self.queue.borrow_mut().pop_front().expect("as many as were queued");
            let (from, to, len) = match copy {
                Copy::Up(dst, src, len) => (src, device[dst as usize..][..len].as_mut_ptr(), len),
                Copy::Down(dst, src, len) => (device[src as usize..][..len].as_ptr(), dst, len),
            };
            // SAFETY: the slices above, and what the ring promises of its slots.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        }
    }
}

impl Lane for LateLane {
    type Mark = usize;

    unsafe fn to_device(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        self.queue(Copy::Up(dst, src, len));
        Ok(())
    }

    unsafe fn to_host(&self, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        self.queue(Copy::Down(dst, src, len));
        Ok(())
    }

    fn mark(&self, _spare: Option<usize>) -> Result<usize> {
        Ok(self.queued.get())
    }

    fn wait(&self, mark: &usize) -> Result<()> {
        self.work_until(*mark);
        Ok(())
    }
}

/// A ring and the memory below it.
fn ring() -> (Ring<usize>, Vec<u8>) {
    let mut memory = vec![0xEE; SLOT * SLOTS];
    // SAFETY: the test keeps the memory and does not look at it.
    (unsafe { Ring::new(NonNull::new(memory.as_mut_ptr()).expect("not empty")) }, memory)
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 7 + i / 251) as u8).collect()
}

#[test]
fn uploads_wait_for_nothing_while_there_is_room() {
    let (mut ring, _memory) = ring();
    let lane = LateLane::new(vec![0; 8 * SLOT]);
    let mut source = pattern(2 * SLOT, 1);
    let wanted = source.clone();
    // SAFETY: host and device have the bytes.
    unsafe { ring.upload(&lane, 100, source.as_ptr(), source.len()) }.expect("works");
    source.fill(0);
    ring.finish(&lane).expect("works");
    // The next batch waits for none before it while slots are left.
    // SAFETY: as above.
    unsafe { ring.upload(&lane, 0, wanted.as_ptr(), 100) }.expect("works");
    ring.finish(&lane).expect("works");
    assert_eq!(lane.done.get(), 0);
    lane.work_until(lane.queued.get());
    assert!(lane.device.borrow()[100..][..wanted.len()] == wanted);
}

#[test]
fn small_downloads_share_one_wait() {
    let (mut ring, _memory) = ring();
    let lane = LateLane::new(pattern(SLOT, 2));
    let mut targets = vec![[0u8; 100]; 50];
    for (i, target) in targets.iter_mut().enumerate() {
        // SAFETY: host and device have the bytes.
        unsafe { ring.download(&lane, target.as_mut_ptr(), i as u64 * 1000, 100) }.expect("works");
    }
    assert_eq!(lane.done.get(), 0);
    ring.finish(&lane).expect("works");
    for (i, target) in targets.iter().enumerate() {
        assert_eq!(target[..], lane.device.borrow()[i * 1000..][..100]);
    }
}

#[test]
fn an_upload_sees_what_was_downloaded_before() {
    let (mut ring, _memory) = ring();
    let lane = LateLane::new(pattern(SLOT, 3));
    let wanted = lane.device.borrow()[..100].to_vec();
    let mut host = [0u8; 100];
    // SAFETY: host and device have the bytes.
    unsafe {
        ring.download(&lane, host.as_mut_ptr(), 0, 100).expect("works");
        ring.upload(&lane, 5000, host.as_ptr(), 100).expect("works");
    }
    ring.finish(&lane).expect("works");
    lane.work_until(lane.queued.get());
    assert_eq!(lane.device.borrow()[5000..][..100], wanted);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    /// Batches of copies: uploads and downloads of any size, in any order.
    #[test]
    fn bytes_arrive(batches in proptest::collection::vec(
        proptest::collection::vec((any::<bool>(), prop_oneof![1usize..2000, 1usize..(3 * SLOT)], 0usize..SLOT), 1..12),
        1..5,
    )) {
        let (mut ring, _memory) = ring();
        let lane = LateLane::new(pattern(4 * SLOT, 0));
        let mut model = pattern(4 * SLOT, 0);
        for (b, batch) in batches.iter().enumerate() {
            let mut targets = Vec::new();
            for (i, &(up, len, at)) in batch.iter().enumerate() {
                if up {
                    let mut source = pattern(len, 100 * b + i);
                    // SAFETY: host and device have the bytes.
                    unsafe { ring.upload(&lane, at as u64, source.as_ptr(), len) }.expect("works");
                    model[at..][..len].copy_from_slice(&source);
                    source.fill(0xDD);
                } else {
                    let mut target = vec![0u8; len];
                    // SAFETY: as above; the target's heap memory stays where it is.
                    unsafe { ring.download(&lane, target.as_mut_ptr(), at as u64, len) }.expect("works");
                    targets.push((target, model[at..][..len].to_vec()));
                }
            }
            ring.finish(&lane).expect("works");
            prop_assert!(targets.iter().all(|(got, wanted)| got == wanted));
        }
        lane.work_until(lane.queued.get());
        prop_assert!(*lane.device.borrow() == model);
    }
}
