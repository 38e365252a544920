//! Times MatMulNBits alone, over the shapes of a 0.8B hybrid decoder: `cargo run --release --example matmul_bench [tier]`.
//!
//! "step" runs every projection of one decode step with weights of its own (474 MB at int4 with float scales), so weights
//! come from memory as in a real step. Shapes alone cycle over enough copies to leave the cache.

use kernels::build::{BuildCx, Constants};
use kernels::fact::Fact;
use kernels::kernel::Kernel;
use kernels::op::{NodeCx, NodeLabel};
use kernels::par::Par;
use kernels::settings::Settings;
use kernels::weights::PackCache;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A second thread that waits for work by spinning, as ORT's pool does.
struct Pool {
    /// The running task, as two words; valid while `epoch` is odd.
    task: [AtomicUsize; 2],
    epoch: AtomicUsize,
    left: AtomicUsize,
}

impl Pool {
    const fn new() -> Self {
        Self { task: [const { AtomicUsize::new(0) }; 2], epoch: AtomicUsize::new(0), left: AtomicUsize::new(0) }
    }

    fn work(&self) {
        let mut seen = 0;
        loop {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch == seen {
                std::hint::spin_loop();
                continue;
            }
            seen = epoch;
            let task = [self.task[0].load(Ordering::Relaxed), self.task[1].load(Ordering::Relaxed)];
            // SAFETY: `run` stored a live task's reference and waits until it is done.
            let task: &(dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
            task(1);
            self.left.store(0, Ordering::Release);
        }
    }
}

impl abi::ParallelFor for Pool {
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        assert!(total <= 2, "two threads take two tasks");
        if total == 2 {
            // SAFETY: a fat pointer is two words.
            let words: [usize; 2] = unsafe { std::mem::transmute(task) };
            self.task.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
            self.left.store(1, Ordering::Relaxed);
            self.epoch.fetch_add(1, Ordering::Release);
        }
        task(0);
        while total == 2 && self.left.load(Ordering::Acquire) != 0 {
            std::hint::spin_loop();
        }
    }
}

/// What a projection is quantised to.
#[derive(Clone, Copy)]
struct Format {
    bits: usize,
    block: usize,
    level: i64,
}

/// One projection with random weights.
struct Projection {
    kernel: Box<dyn Kernel>,
    label: NodeLabel,
    k: usize,
    n: usize,
    bytes: usize,
}

/// Random bytes.
fn random(n: usize, state: &mut u64) -> Vec<u8> {
    let mut out = vec![0u8; n];
    for chunk in out.chunks_mut(8) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    out
}

fn projection(k: usize, n: usize, format: Format, settings: &Settings, state: &mut u64) -> Projection {
    let blocks = k.div_ceil(format.block);
    let blob = format.block * format.bits / 8;
    let scales: Vec<f32> = random(n * blocks, state).iter().map(|&v| (f32::from(v) + 1.0) * 1e-4).collect();
    let b = random(n * blocks * blob, state);
    let bytes = b.len() + 4 * scales.len();
    let tensors = [
        abi::HostTensor::new(&[1, k], &vec![0f32; k]),
        abi::HostTensor::new(&[n, blocks, blob], &b),
        abi::HostTensor::new(&[n, blocks], &scales),
    ];
    let mut graph = abi::Graph::default();
    for (i, t) in tensors.iter().enumerate() {
        graph.values.push(abi::Value {
            name: format!("x{i}"),
            dtype: Some(t.dtype()),
            shape: Some(t.shape().iter().map(|&d| abi::Dim::Known(d)).collect()),
            initializer: (i > 0).then(|| abi::Initializer {
                dtype: t.dtype(),
                shape: t.shape().to_vec(),
                data: abi::InitializerData::Inline(t.clone()),
            }),
        });
    }
    let int = |name: &str, v: usize| (name.to_owned(), abi::Attr::Int(v as i64));
    graph.nodes.push(abi::Node {
        name: "projection".into(),
        domain: "com.microsoft".into(),
        op_type: "MatMulNBits".into(),
        since_version: 1,
        inputs: vec![Some(0), Some(1), Some(2)],
        outputs: vec![None],
        attrs: vec![
            int("K", k),
            int("N", n),
            int("bits", format.bits),
            int("block_size", format.block),
            int("accuracy_level", format.level as usize),
        ],
        implicit_inputs: Vec::new(),
        handle: 0,
    });
    let facts: Vec<_> = tensors
        .iter()
        .map(|t| Some(Arc::new(Fact::new(t.dtype(), t.shape().iter().map(|&d| abi::Dim::Known(d)).collect()))))
        .collect();
    let (mut constants, cache) = (Constants::default(), PackCache::default());
    let node = NodeCx::new(&graph, 0, &facts);
    let def = kernels::op::find(&graph.nodes[0]).expect("MatMulNBits is in the table");
    let mut cx = BuildCx::new(node, settings, &mut constants, &cache);
    let kernel = (def.build)(&mut cx).expect("the node is well formed");
    Projection { kernel, label: NodeLabel::of(&graph.nodes[0]), k, n, bytes }
}

impl Projection {
    fn run(&self, m: usize, par: Par<'_>) {
        let inputs = [Some(abi::HostTensor::new(&[m, self.k], &vec![0.5f32; m * self.k])), None, None];
        let outputs = [Some((abi::DType::F32, vec![m, self.n]))];
        kernels::eval::run(&*self.kernel, &self.label, &inputs, &outputs, par).expect("a run succeeds");
    }
}

/// The median of `rounds` timings, in seconds.
fn median(rounds: usize, mut f: impl FnMut()) -> f64 {
    f();
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[rounds / 2]
}

/// Bytes a second that two threads read from memory.
fn read_bandwidth(par: Par<'_>) -> f64 {
    let data = vec![1u64; 1 << 27];
    let sum = AtomicUsize::new(0);
    let time = median(5, || {
        par.ranges(data.len(), 1 << 20, |range| {
            let mut sums = [0u64; 8];
            for chunk in data[range].chunks_exact(8) {
                sums.iter_mut().zip(chunk).for_each(|(s, v)| *s = s.wrapping_add(*v));
            }
            sum.fetch_add(sums.iter().sum::<u64>() as usize, Ordering::Relaxed);
        });
    });
    std::hint::black_box(sum);
    data.len() as f64 * 8.0 / time
}

/// (K, N, how many in a step).
const SHAPES: [(usize, usize, usize); 7] = [
    (1024, 3584, 48),
    (3584, 1024, 24),
    (1024, 6144, 18),
    (1024, 2048, 18),
    (2048, 1024, 24),
    (1024, 5120, 6),
    (1024, 248_320, 1),
];

fn main() {
    let tier = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let settings = Settings { tier: tier.parse().expect("a tier"), chunks: 2, ..Settings::default() };
    static POOL: Pool = Pool::new();
    std::thread::spawn(|| POOL.work());
    let par = Par::new(&POOL, 2);
    let bandwidth = read_bandwidth(par);
    println!("tier {}, read bandwidth {:.1} GB/s", settings.tier, bandwidth / 1e9);
    let mut state = 88_172_645_463_325_252;
    let format = Format { bits: 4, block: 32, level: 4 };
    let step: Vec<_> = SHAPES
        .iter()
        .flat_map(|&(k, n, count)| std::iter::repeat_n((k, n), count))
        .map(|(k, n)| projection(k, n, format, &settings, &mut state))
        .collect();
    let bytes: usize = step.iter().map(|p| p.bytes).sum();
    let time = median(9, || step.iter().for_each(|p| p.run(1, par)));
    let rate = bytes as f64 / time;
    println!(
        "step int4 level 4 M=1: {:.2} ms, {:.1} GB/s ({:.0}% of read bandwidth), {} MB",
        time * 1e3,
        rate / 1e9,
        100.0 * rate / bandwidth,
        bytes >> 20
    );
    for m in [128, 512] {
        let body = &step[..step.len() - 1];
        let macs: usize = body.iter().map(|p| p.k * p.n * m).sum();
        let time = median(3, || body.iter().for_each(|p| p.run(m, par)));
        println!(
            "prefill int4 level 4 M={m}: {:.1} ms, {:.3} TOPS, {:.0} tokens/s without the head",
            time * 1e3,
            2.0 * macs as f64 / time / 1e12,
            m as f64 / time
        );
    }
    drop(step);
    println!(
        "{:>6} {:>7} {:>4} {:>5} {:>5} {:>5} {:>10} {:>8} {:>8}",
        "K", "N", "bits", "block", "level", "M", "us", "GB/s", "TOPS"
    );
    for (k, n, _) in SHAPES.into_iter().take(3) {
        for (bits, block, level) in [(4, 32, 4), (4, 128, 4), (8, 32, 4), (4, 32, 0)] {
            let format = Format { bits, block, level };
            let one = projection(k, n, format, &settings, &mut state);
            let copies = (400 << 20) / one.bytes;
            let all: Vec<_> = (0..copies).map(|_| projection(k, n, format, &settings, &mut state)).collect();
            for m in [1, 128] {
                let used = if m == 1 { &all[..] } else { &all[..4] };
                let time = median(3, || used.iter().for_each(|p| p.run(m, par))) / used.len() as f64;
                println!(
                    "{k:>6} {n:>7} {bits:>4} {block:>5} {level:>5} {m:>5} {:>10.1} {:>8.1} {:>8.3}",
                    time * 1e6,
                    one.bytes as f64 / time / 1e9,
                    2.0 * (m * k * n) as f64 / time / 1e12
                );
            }
        }
    }
}
