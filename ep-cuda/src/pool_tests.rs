//! The pool on an emulated device: addresses are numbers, and streams advance when a test says so.

use super::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A stream: how much work was queued, and how much of it is done.
#[derive(Default)]
struct Stream {
    queued: AtomicUsize,
    done: AtomicUsize,
}

impl Stream {
    fn work(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    fn advance(&self, to: usize) {
        self.done.fetch_max(to.min(self.queued()), Ordering::Relaxed);
    }
}

/// Events hold their stream, and how much work they come after.
#[derive(Default)]
struct FakeMarks {
    capturing: std::sync::atomic::AtomicBool,
}

impl Marks for FakeMarks {
    type Stream = Arc<Stream>;
    type Event = (Arc<Stream>, usize);

    fn record(&self, stream: &Arc<Stream>, _spare: Option<Self::Event>) -> Option<Self::Event> {
        (!self.capturing.load(Ordering::Relaxed)).then(|| (stream.clone(), stream.queued()))
    }

    fn passed(&self, (stream, after): &Self::Event) -> bool {
        stream.done() >= *after
    }

    fn wait(&self, (stream, after): &Self::Event) {
        stream.advance(*after);
    }
}

/// Memory without bytes; refuses what goes over its size.
struct FakeSource {
    size: usize,
    held: Mutex<HashMap<usize, usize>>,
    top: AtomicUsize,
}

impl FakeSource {
    fn new(size: usize) -> Self {
        Self { size, held: Mutex::default(), top: AtomicUsize::new(SLAB) }
    }

    fn held(&self) -> usize {
        self.held.lock().expect("no panic while locked").values().sum()
    }
}

impl Source for FakeSource {
    fn take(&self, bytes: usize) -> Option<usize> {
        if self.held() + bytes > self.size {
            return None;
        }
        let address = self.top.fetch_add(bytes, Ordering::Relaxed);
        self.held.lock().expect("no panic while locked").insert(address, bytes);
        Some(address)
    }

    fn give(&self, address: usize, bytes: usize) {
        assert_eq!(self.held.lock().expect("no panic while locked").remove(&address), Some(bytes), "{address}");
    }
}

struct Device {
    pool: Pool<FakeSource, FakeMarks>,
    timeline: Arc<Timeline<FakeMarks>>,
    streams: Vec<(StreamKey, Arc<Stream>)>,
}

fn device(kind: Kind, size: usize, streams: usize) -> Device {
    let timeline = Arc::new(Timeline::new(FakeMarks::default()));
    let stream = |i| {
        let stream = Arc::<Stream>::default();
        (timeline.add(i, Arc::new(stream.clone())), stream)
    };
    let streams = (0..streams).map(stream).collect();
    Device { pool: Pool::new(FakeSource::new(size), timeline.clone(), kind), timeline, streams }
}

const MIB: usize = 1 << 20;

#[test]
fn sizes_grow_by_a_quarter_of_an_octave() {
    for (bytes, size) in [
        (0, 512),
        (1, 512),
        (513, 1024),
        (1025, 1536),
        (4096, 4096),
        (4097, 5120),
        (3 * MIB + 1, 7 * MIB / 2),
        (65 * MIB, 68 * MIB),
        (1 << 30, 1 << 30),
    ] {
        assert_eq!(block_size(bytes), Some(size), "{bytes}");
    }
    assert_eq!(block_size(usize::MAX), None);
    for bytes in (1..100_000).chain([MIB + 1, 100 * MIB + 1]) {
        let size = block_size(bytes).expect("small");
        assert!(
            size >= bytes && size.is_multiple_of(SMALLEST) && (size <= bytes + bytes / 4 || size < 4096),
            "{bytes} {size}"
        );
    }
}

#[test]
fn a_stream_gets_its_own_block_back_at_once_and_others_wait() {
    let Device { pool, streams, .. } = device(Kind::Device, 1 << 30, 2);
    let [(a, work), (b, _)] = &streams[..] else { unreachable!() };
    let block = pool.alloc(5000, Some(*a)).expect("room");
    work.work();
    assert!(pool.free(block));
    assert!(!pool.free(block), "a block is freed once");
    assert_eq!(pool.alloc(5000, Some(*a)), Some(block), "stream order makes it safe");
    assert!(pool.free(block));
    let other = pool.alloc(5000, Some(*b)).expect("room");
    let none = pool.alloc(5000, None).expect("room");
    assert!(other != block && none != block, "its work is not done");
    work.advance(1);
    assert_eq!(pool.alloc(5000, Some(*b)), Some(block));
}

#[test]
fn blocks_without_a_stream_wait_for_all_streams() {
    let Device { pool, streams, .. } = device(Kind::Device, 1 << 30, 2);
    let [(a, first), (_, second)] = &streams[..] else { unreachable!() };
    let block = pool.alloc(MIB, None).expect("room");
    first.work();
    second.work();
    assert!(pool.free(block));
    // What is queued after the free does not concern the block.
    first.work();
    second.work();
    assert_ne!(pool.alloc(MIB, Some(*a)), Some(block));
    second.advance(1);
    assert_eq!(pool.alloc(MIB, Some(*a)), Some(block), "the first stream's own work need not be done");
    assert!(pool.free(block));
    second.advance(9);
    assert_ne!(pool.alloc(MIB, None), Some(block));
    first.advance(9);
    assert_eq!(pool.alloc(MIB, None), Some(block));
}

#[test]
fn host_memory_waits_even_for_its_own_stream() {
    let Device { pool, streams, .. } = device(Kind::Host, 1 << 30, 1);
    let [(a, work)] = &streams[..] else { unreachable!() };
    let block = pool.alloc(100, Some(*a)).expect("room");
    work.work();
    assert!(pool.free(block));
    assert_ne!(pool.alloc(100, Some(*a)), Some(block), "the host would write while the stream reads");
    work.advance(1);
    assert_eq!(pool.alloc(100, Some(*a)), Some(block));
}

#[test]
fn streams_that_are_gone_hold_nothing_back() {
    let Device { pool, timeline, streams } = device(Kind::Device, 1 << 30, 2);
    let [(a, work), (b, _)] = &streams[..] else { unreachable!() };
    let block = pool.alloc(MIB, Some(*a)).expect("room");
    work.work();
    assert!(pool.free(block));
    let again = timeline.add(0, Arc::new(work.clone()));
    assert_eq!(again, *a, "the same stream twice");
    timeline.remove(*a);
    assert_ne!(pool.alloc(MIB, Some(*b)), Some(block), "it is still there");
    timeline.remove(*a);
    assert_eq!(pool.alloc(MIB, Some(*b)), Some(block));
    assert!(pool.free(block));
    let reborn = timeline.add(0, Arc::new(Arc::default()));
    assert_ne!(reborn, *a, "a handle may come back, a key never does");
    assert!(timeline.find(0).is_some() && timeline.find(7).is_none());
}

#[test]
fn a_stream_that_cannot_be_marked_holds_its_blocks() {
    let timeline = Arc::new(Timeline::new(FakeMarks { capturing: true.into() }));
    let stream = Arc::<Stream>::default();
    timeline.add(0, Arc::new(stream));
    let pool = Pool::new(FakeSource::new(1 << 30), timeline.clone(), Kind::Device);
    let block = pool.alloc(MIB, None).expect("room");
    assert!(pool.free(block));
    assert_ne!(pool.alloc(MIB, None), Some(block));
    timeline.marks.capturing.store(false, Ordering::Relaxed);
    assert_eq!(pool.alloc(MIB, None), Some(block));
}

#[test]
fn when_memory_is_short_the_free_blocks_go_first() {
    let Device { pool, streams, .. } = device(Kind::Device, 10 * MIB, 2);
    let [(a, work), (b, _)] = &streams[..] else { unreachable!() };
    let large = pool.alloc(6 * MIB, Some(*a)).expect("room");
    let small = pool.alloc(1000, Some(*a)).expect("room");
    work.work();
    assert_eq!(pool.alloc(6 * MIB, Some(*b)), None);
    assert!(pool.free(large));
    let idle = pool.alloc(MIB, Some(*b)).expect("room without the block");
    assert_eq!(work.done(), 0, "nobody waits while there is room");
    assert!(pool.free(idle) && pool.free(small));
    let all = pool.alloc(10 * MIB, Some(*b)).expect("the blocks and the slab are given back");
    assert_eq!(work.done(), 1, "the work on the block was waited for");
    assert!(pool.free(all));
    pool.shrink();
    assert_eq!((pool.source.held(), pool.stats().held, pool.stats().in_use), (0, 0, 0));
}

#[test]
fn reserves_go_past_the_pool() {
    let Device { pool, .. } = device(Kind::Device, 10 * MIB, 1);
    let block = pool.reserve(3 * MIB + 1).expect("room");
    assert_eq!((pool.source.held(), pool.stats().reserves), (3 * MIB + 512, 1));
    assert!(pool.free(block));
    assert_eq!((pool.source.held(), pool.stats().held), (0, 0));
}

#[test]
fn figures_count() {
    let Device { pool, .. } = device(Kind::Device, 10 * MIB, 1);
    let blocks = [100, 3 * MIB].map(|bytes| pool.alloc(bytes, None).expect("room"));
    assert!(pool.free(blocks[1]));
    let wanted = Stats {
        allocs: 2,
        reserves: 0,
        in_use: 512,
        max_in_use: 3 * MIB + 512,
        largest: 3 * MIB,
        held: 5 * MIB,
        extensions: 2,
        shrinkages: 0,
    };
    assert_eq!(pool.stats(), wanted);
    pool.shrink();
    assert_eq!(pool.stats(), Stats { held: 2 * MIB, shrinkages: 1, ..wanted });
}

#[test]
fn memory_is_flat_after_a_warm_up() {
    let Device { pool, streams, .. } = device(Kind::Device, 1 << 40, 3);
    let round = |round: usize| {
        for step in 0..200 {
            let (key, stream) = &streams[step % 3];
            let sizes = [4, 37 * (step + 1), 4096 * (1 + step % 50), MIB + step * 8192];
            let blocks = sizes.map(|bytes| pool.alloc(bytes, Some(*key).filter(|_| step % 5 > 0)).expect("room"));
            stream.work();
            blocks.into_iter().rev().for_each(|block| assert!(pool.free(block)));
            stream.advance(stream.queued() - (step + round) % 2);
        }
        pool.source.held()
    };
    let warm = (0..3).map(round).last();
    assert!((3..10).map(round).all(|held| Some(held) <= warm), "{warm:?}");
}

/// What a random test does.
#[derive(Debug, Clone)]
enum Step {
    Alloc { bytes: usize, stream: Option<usize> },
    Reserve { bytes: usize },
    Free { which: usize },
    Work { stream: usize },
    Advance { stream: usize, by: usize },
    Shrink,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![1usize..3000, 1usize..(5 << 20)];
    prop_oneof![
        6 => (bytes.clone(), proptest::option::of(0usize..3)).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        1 => bytes.prop_map(|bytes| Step::Reserve { bytes }),
        6 => any::<usize>().prop_map(|which| Step::Free { which }),
        4 => (0usize..3).prop_map(|stream| Step::Work { stream }),
        3 => (0usize..3, 1usize..9).prop_map(|(stream, by)| Step::Advance { stream, by }),
        1 => Just(Step::Shrink),
    ]
}

/// A block that was freed, and how far each stream must be before others may have its bytes.
struct Ghost {
    address: usize,
    bytes: usize,
    needs: Vec<usize>,
}

/// Does the steps, and checks each address that comes out.
fn check(kind: Kind, size: usize, steps: &[Step]) {
    let Device { pool, streams, .. } = device(kind, size, 3);
    let mut live: Vec<(usize, usize, Option<usize>)> = Vec::new();
    let mut ghosts: Vec<Ghost> = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc { .. } | Step::Reserve { .. } => {
                let (bytes, stream, reserve) = match *step {
                    Step::Alloc { bytes, stream } => (bytes, stream, false),
                    Step::Reserve { bytes } => (bytes, None, true),
                    _ => unreachable!(),
                };
                let got = match reserve {
                    true => pool.reserve(bytes),
                    false => pool.alloc(bytes, stream.map(|i| streams[i].0)),
                };
                let Some(address) = got else { continue };
                assert_eq!(address % SMALLEST, 0);
                let overlaps = |a: usize, n: usize| a < address + bytes && address < a + n;
                assert!(live.iter().all(|&(a, n, _)| !overlaps(a, n)), "live blocks overlap");
                let stream = stream.filter(|_| kind == Kind::Device && !reserve);
                for ghost in ghosts.iter().filter(|ghost| overlaps(ghost.address, ghost.bytes)) {
                    for (i, &need) in ghost.needs.iter().enumerate() {
                        assert!(stream == Some(i) || streams[i].1.done() >= need, "work of stream {i} is not done");
                    }
                }
                live.push((address, bytes, stream));
            }
            Step::Free { which } if !live.is_empty() => {
                let (address, bytes, stream) = live.swap_remove(which % live.len());
                let need = |(i, (_, s)): (usize, &(StreamKey, Arc<Stream>))| match stream {
                    Some(own) if own != i => 0,
                    _ => s.queued(),
                };
                ghosts.push(Ghost { address, bytes, needs: streams.iter().enumerate().map(need).collect() });
                assert!(pool.free(address));
            }
            Step::Free { .. } => {}
            Step::Work { stream } => streams[stream].1.work(),
            Step::Advance { stream, by } => streams[stream].1.advance(streams[stream].1.done() + by),
            Step::Shrink => pool.shrink(),
        }
        let stats = pool.stats();
        assert_eq!(stats.held, pool.source.held());
        assert!(stats.in_use <= stats.held && stats.in_use >= live.iter().map(|(_, n, _)| n).sum());
    }
    live.into_iter().for_each(|(address, ..)| assert!(pool.free(address)));
    pool.shrink();
    assert_eq!(pool.source.held(), 0, "everything goes back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_device_memory(steps in proptest::collection::vec(step(), 1..200)) {
        check(Kind::Device, 1 << 40, &steps);
    }

    #[test]
    fn random_device_memory_that_is_short(steps in proptest::collection::vec(step(), 1..200)) {
        check(Kind::Device, 24 << 20, &steps);
    }

    #[test]
    fn random_host_memory(steps in proptest::collection::vec(step(), 1..200)) {
        check(Kind::Host, 40 << 20, &steps);
    }
}

#[test]
fn an_address_that_is_used_again_has_another_serial() {
    let Device { pool, .. } = device(Kind::Device, 1 << 24, 1);
    let first = pool.alloc(1000, None).expect("room");
    let serials = |pool: &Pool<_, _>| pool.serials(&[first as u64, first as u64 + 8]);
    let (before, inside) = (serials(&pool)[0], serials(&pool)[1]);
    assert!(before.is_some() && inside.is_none());
    assert!(pool.free(first));
    assert_eq!(serials(&pool)[0], None);
    while pool.alloc(1000, None).expect("room") != first {}
    assert!(serials(&pool)[0].is_some_and(|now| Some(now) != before));
}
