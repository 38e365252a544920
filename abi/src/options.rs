//! Declared provider options: each has a name, a type, a default and one line of help, and no other is accepted.

use crate::error::{Error, Result};
use std::fmt;

/// What values an option takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `1`, `0`, `true` or `false`.
    Bool,
    /// A whole number between two bounds, both included.
    Int {
        /// The smallest.
        min: i64,
        /// The largest.
        max: i64,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Any text.
    Text,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("0 or 1"),
            Self::Int { min, max: i64::MAX } => write!(f, "a whole number from {min}"),
            Self::Int { min, max } => write!(f, "a whole number from {min} to {max}"),
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
            Self::Text => f.write_str("text"),
        }
    }
}

/// An option's declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionDef {
    /// Its name, as users give it.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The value when the user gives none; must be of the kind, or empty for [`Kind::Text`].
    pub default: &'static str,
    /// One line on what it does.
    pub help: &'static str,
}

/// The value of every declared option.
#[derive(Debug, Clone)]
pub struct Options {
    defs: &'static [OptionDef],
    values: Vec<String>,
}

impl Options {
    /// Reads the options that the user gave; a later one of the same name wins. Names in `tolerated` are passed over.
    ///
    /// # Errors
    /// [`Error::Option`] for a value of the wrong kind, and for an unknown name, with the nearest known one.
    pub fn parse<'a>(
        defs: &'static [OptionDef],
        tolerated: &[&str],
        given: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self> {
        let mut values: Vec<String> = defs.iter().map(|def| def.default.into()).collect();
        for (name, value) in given {
            match defs.iter().position(|def| def.name == name) {
                Some(i) => values[i] = checked(&defs[i], value)?,
                None if tolerated.contains(&name) => {}
                None => {
                    let (name, got) = (name.to_owned(), value.to_owned());
                    return Err(Error::Option { expected: known(defs, &name), name, got });
                }
            }
        }
        Ok(Self { defs, values })
    }

    /// An option of [`Kind::Bool`]. Panics, like the other readers, when there is no such option of this kind.
    pub fn bool(&self, name: &str) -> bool {
        self.value(name, |kind| kind == Kind::Bool) == "1"
    }

    /// An option of [`Kind::Int`].
    pub fn int(&self, name: &str) -> i64 {
        let value = self.value(name, |kind| matches!(kind, Kind::Int { .. }));
        value.parse().expect("`parse` checked the value and a test the default")
    }

    /// An option of [`Kind::Choice`] or [`Kind::Text`].
    pub fn text(&self, name: &str) -> &str {
        self.value(name, |kind| matches!(kind, Kind::Choice(_) | Kind::Text))
    }

    fn value(&self, name: &str, fits: impl Fn(Kind) -> bool) -> &str {
        let i = self.defs.iter().position(|def| def.name == name && fits(def.kind));
        &self.values[i.unwrap_or_else(|| panic!("option '{name}' is not declared with this type"))]
    }
}

/// The options as text, one line each: what `options()` and the documentation show.
pub fn listing(defs: &[OptionDef]) -> String {
    let line = |def: &OptionDef| format!("{} ({}; default '{}'): {}\n", def.name, def.kind, def.default, def.help);
    defs.iter().map(line).collect()
}

/// Asserts what the readers rely on: every default is of its option's kind, and no name comes twice. For tests.
pub fn check_declarations(defs: &'static [OptionDef]) {
    for (i, def) in defs.iter().enumerate() {
        let default = checked(def, def.default);
        assert_eq!(default.as_deref(), Ok(def.default), "default of option '{}'", def.name);
        assert!(defs[..i].iter().all(|other| other.name != def.name), "option '{}' comes twice", def.name);
    }
}

/// The value in the one form that the readers know.
fn checked(def: &OptionDef, value: &str) -> Result<String> {
    let bad = || Error::Option { name: def.name.into(), got: value.into(), expected: def.kind.to_string() };
    match def.kind {
        Kind::Bool => match value.to_ascii_lowercase().as_str() {
            "1" | "true" => Ok("1".into()),
            "0" | "false" => Ok("0".into()),
            _ => Err(bad()),
        },
        Kind::Int { min, max } => match value.trim().parse::<i64>() {
            Ok(n) if (min..=max).contains(&n) => Ok(n.to_string()),
            _ => Err(bad()),
        },
        Kind::Choice(words) => words.contains(&value).then(|| value.into()).ok_or_else(bad),
        Kind::Text => Ok(value.into()),
    }
}

/// "a known option" in words: the nearest name first.
fn known(defs: &[OptionDef], name: &str) -> String {
    let nearest = defs.iter().map(|def| def.name).min_by_key(|known| distance(known, name));
    match nearest {
        None => "no option at all: this EP has none".into(),
        Some(nearest) => {
            let names: Vec<_> = defs.iter().map(|def| def.name).collect();
            format!("a known option; did you mean '{nearest}'? All: {}", names.join(", "))
        }
    }
}

/// The number of letters to insert, delete or replace to turn `a` into `b` (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFS: &[OptionDef] = &[
        OptionDef { name: "chunks", kind: Kind::Int { min: 0, max: 64 }, default: "0", help: "Tasks a loop." },
        OptionDef { name: "tier", kind: Kind::Choice(&["auto", "scalar"]), default: "auto", help: "SIMD tier." },
        OptionDef { name: "verbose", kind: Kind::Bool, default: "0", help: "More log lines." },
        OptionDef { name: "label", kind: Kind::Text, default: "", help: "A name for logs." },
    ];

    #[test]
    fn defaults_and_values() {
        check_declarations(DEFS);
        let none = Options::parse(DEFS, &[], []).expect("no option is fine");
        assert_eq!((none.int("chunks"), none.text("tier"), none.bool("verbose")), (0, "auto", false));
        let given = [("chunks", " 7 "), ("verbose", "True"), ("tier", "scalar"), ("chunks", "8"), ("label", "x")];
        let some = Options::parse(DEFS, &[], given).expect("all are good");
        assert_eq!((some.int("chunks"), some.text("tier"), some.bool("verbose")), (8, "scalar", true));
        assert_eq!(some.text("label"), "x");
    }

    #[test]
    fn bad_values_say_what_would_be_right() {
        for (name, got, expected) in [
            ("chunks", "65", "a whole number from 0 to 64"),
            ("chunks", "-1", "a whole number from 0 to 64"),
            ("chunks", "", "a whole number from 0 to 64"),
            ("tier", "Scalar", "one of auto, scalar"),
            ("verbose", "yes", "0 or 1"),
        ] {
            let error = Options::parse(DEFS, &[], [(name, got)]).expect_err("a bad value");
            assert_eq!(error, Error::Option { name: name.into(), got: got.into(), expected: expected.into() });
        }
    }

    #[test]
    fn unknown_names_point_to_the_nearest() {
        let error = Options::parse(DEFS, &[], [("chunk", "1")]).expect_err("an unknown name").to_string();
        assert!(error.contains("did you mean 'chunks'?"), "{error}");
        assert!(Options::parse(DEFS, &["chunk"], [("chunk", "1")]).is_ok());
        let error = Options::parse(&[], &[], [("x", "1")]).expect_err("an unknown name").to_string();
        assert!(error.contains("this EP has none"), "{error}");
    }

    #[test]
    fn listing_shows_every_option() {
        let text = listing(DEFS);
        assert_eq!(text.lines().count(), DEFS.len());
        assert!(text.starts_with("chunks (a whole number from 0 to 64; default '0'): Tasks a loop.\n"));
    }

    #[test]
    fn distance_is_levenshtein() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("tier", "tier"), 0);
    }
}
