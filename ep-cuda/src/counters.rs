//! What this library has done since it was loaded, for tests and users.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// Something counted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Counter { $($(#[$doc])* $name),* }

        /// The counters' names, in order.
        pub const NAMES: &[&std::ffi::CStr] = &[$($text),*];
    };
}

counters! {
    /// CUDA graphs built.
    Captures = c"captures",
    /// Launches of a CUDA graph.
    Replays = c"replays",
    /// Kernel nodes of a graph whose parameters were changed.
    Updates = c"updates",
    /// Runs without a graph.
    EagerRuns = c"eager_runs",
    /// Runs whose graph ORT's own replay launched.
    ManagedReplays = c"managed_replays",
    /// Inputs whose contents the host had to read, since shapes depend on them: only where a model is cut into groups.
    ReadBacks = c"read_backs",
    /// Inputs copied before a Run, since they share memory with an output or lie in pageable memory.
    CopiedInputs = c"copied_inputs",
    /// Bytes copied from the host to a device.
    BytesToDevice = c"bytes_to_device",
    /// Bytes copied from a device to the host.
    BytesToHost = c"bytes_to_host",
    /// Bytes of device memory in use: weights, workspaces and tensors.
    BytesInUse = c"bytes_in_use",
}

static VALUES: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Counts `n` more.
pub fn add(counter: Counter, n: u64) {
    VALUES[counter as usize].fetch_add(n, Ordering::Relaxed);
}

/// Counts `n` less.
pub fn subtract(counter: Counter, n: u64) {
    VALUES[counter as usize].fetch_sub(n, Ordering::Relaxed);
}

/// Every counter's value, in the order of [`NAMES`].
pub fn values() -> [u64; NAMES.len()] {
    std::array::from_fn(|i| VALUES[i].load(Ordering::Relaxed))
}

abi::export_counters!(nxrt_cuda_counters, NAMES, values);
