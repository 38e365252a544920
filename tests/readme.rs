//! README's list of ops is the op table's.

use std::collections::BTreeSet;

#[test]
fn readme_lists_every_op_and_no_other() {
    let readme = include_str!("../README.md");
    let section = readme.split("## Supported ops").nth(1).and_then(|s| s.split("\n## ").next()).expect("the section");
    let listed: BTreeSet<&str> = section
        .lines()
        .filter(|line| line.starts_with("- "))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .collect();
    let known: BTreeSet<&str> =
        kernels::ops::all().filter(|def| def.domain != kernels::fuse::DOMAIN).map(|def| def.name).collect();
    let missing: Vec<_> = known.difference(&listed).collect();
    let extra: Vec<_> = listed.difference(&known).collect();
    assert!(missing.is_empty() && extra.is_empty(), "not in README: {missing:?}; only in README: {extra:?}");
}

#[test]
fn readme_lists_every_op_of_the_cpu_alone() {
    let readme = include_str!("../README.md");
    let line = readme.lines().find(|line| line.starts_with("On the CPU EP alone: ")).expect("the line");
    let listed: BTreeSet<&str> = line.split('`').skip(1).step_by(2).collect();
    let known: BTreeSet<&str> = kernels::ops::all()
        // A view, a shape's value or a constant moves nothing and needs no kernel.
        .filter(|def| def.cuda.is_none() && !def.view && !def.shape_only && def.name != "Constant")
        .filter(|def| def.domain != kernels::fuse::DOMAIN)
        .map(|def| def.name)
        .collect();
    assert_eq!(listed, known);
}
