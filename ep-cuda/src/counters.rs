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
    /// Experts that a Run found in device memory, where not all of them are there.
    ExpertHits = c"expert_hits",
    /// Experts that a Run did not find there.
    ExpertMisses = c"expert_misses",
    /// Bytes of experts that Runs fetched from page-locked memory.
    ExpertBytesFetched = c"expert_bytes_fetched",
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn readme_lists_every_counter_and_no_other() {
        let readme = include_str!("../../README.md");
        let table = readme.split("| counter | |").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("the table");
        let cells = table.lines().filter_map(|row| row.split('|').nth(1));
        let listed: BTreeSet<_> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        let known: BTreeSet<_> = super::NAMES.iter().map(|name| name.to_str().expect("names are ASCII")).collect();
        assert_eq!(listed, known);
    }
}
