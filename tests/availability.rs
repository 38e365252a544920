//! The table of older ONNX Runtimes covers the op table.

use std::collections::BTreeSet;

/// `tests/ort/make_availability.py` finds the ops by their names in the sources: it must find each, and no other.
#[test]
fn availability_names_every_op() {
    let table = include_str!("ort/availability.json");
    let ops = table.split_once("\"ops\"").expect("the file has ops").1;
    let listed: BTreeSet<&str> =
        ops.lines().filter_map(|line| line.strip_prefix('"')?.split_once('"')).map(|(name, _)| name).collect();
    let known: Vec<String> = kernels::ops::all()
        .filter(|def| def.domain != kernels::fuse::DOMAIN)
        .map(|def| if def.domain.is_empty() { def.name.into() } else { format!("{}::{}", def.domain, def.name) })
        .collect();
    let known: BTreeSet<&str> = known.iter().map(String::as_str).collect();
    let missing: Vec<_> = known.difference(&listed).collect();
    let extra: Vec<_> = listed.difference(&known).collect();
    assert!(missing.is_empty() && extra.is_empty(), "make_availability.py: missing {missing:?}, too many {extra:?}");
}
