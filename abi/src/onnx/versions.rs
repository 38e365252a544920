//! From an opset import to the version in which an op got the form that the import selects.

use std::collections::HashMap;
use std::sync::LazyLock;

/// Per op of the default domain its since-versions, ascending; see `opsets.py`.
const TABLE: &str = include_str!("opsets.txt");

static VERSIONS: LazyLock<HashMap<&str, Vec<u32>>> = LazyLock::new(|| {
    let parse = |line: &'static str| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        let versions = words.map(|w| w.parse().expect("the table holds numbers"));
        Some((name, versions.collect()))
    };
    TABLE.lines().filter(|l| !l.starts_with('#')).filter_map(parse).collect()
});

/// The since-version of `domain::op_type` under version `opset` of its domain.
///
/// An op of the default domain that the table lacks, or that is newer than `opset`, gets `opset` itself: no
/// definition will match it. Ops of com.microsoft have one version, 1.
pub fn since_version(domain: &str, op_type: &str, opset: u32) -> u32 {
    match domain {
        "" => {
            VERSIONS.get(op_type).and_then(|v| v.iter().rev().find(|&&since| since <= opset).copied()).unwrap_or(opset)
        }
        "com.microsoft" => 1,
        _ => opset,
    }
}

#[cfg(test)]
mod tests {
    use super::since_version;

    #[test]
    fn takes_the_newest_version_not_above_the_import() {
        assert_eq!(since_version("", "Add", 22), 14);
        assert_eq!(since_version("", "Add", 13), 13);
        assert_eq!(since_version("", "RMSNormalization", 24), 23);
        assert_eq!(since_version("", "RMSNormalization", 22), 22);
        assert_eq!(since_version("", "NoSuchOp", 9), 9);
        assert_eq!(since_version("com.microsoft", "MatMulNBits", 7), 1);
        assert_eq!(since_version("a.b", "C", 5), 5);
    }
}
