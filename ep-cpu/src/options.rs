//! The provider options.

use abi::options::{Kind, OptionDef, Options};
use abi::{Error, Result};
use kernels::settings::{Settings, Target};

/// Every option that a session can give.
pub const OPTIONS: &[OptionDef] = &[
    OptionDef {
        name: "tier",
        kind: Kind::Choice(&["auto", "scalar", "avx2", "avx512vnni"]),
        default: "auto",
        help: "Instruction set of the kernels; auto takes the best that the processor has",
    },
    OptionDef {
        name: "chunks",
        kind: Kind::Int { min: 0, max: 1024 },
        default: "0",
        help: "Tasks that a parallel loop starts at most; 0 takes the number of processors that the process may use",
    },
    OptionDef { name: "fusion", kind: Kind::Bool, default: "1", help: "Whether nodes are merged into larger kernels" },
];

/// Settings from the options that the user gave.
///
/// # Errors
/// [`Error::Option`] for an unknown name, with the nearest known one, and for a value of the wrong kind or a tier that
/// the processor lacks.
pub fn settings<'a>(given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Settings> {
    let options = Options::parse(OPTIONS, &[], given)?;
    let tier = options.text("tier");
    let bad_tier = |expected| Error::Option { name: "tier".into(), got: tier.into(), expected };
    let defaults = Settings::default();
    let chunks = usize::try_from(options.int("chunks")).expect("the declaration bounds it");
    Ok(Settings {
        tier: tier.parse().map_err(bad_tier)?,
        chunks: if chunks == 0 { defaults.chunks } else { chunks },
        fusion: options.bool("fusion"),
        target: Target::Cpu,
        ..defaults
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_sound() {
        abi::options::check_declarations(OPTIONS);
    }

    #[test]
    fn options_become_settings() {
        let settings = settings([("tier", "scalar"), ("chunks", "3"), ("fusion", "0")]).expect("all are declared");
        assert_eq!((settings.tier.to_string().as_str(), settings.chunks, settings.fusion), ("scalar", 3, false));
    }

    #[test]
    fn an_unknown_option_names_the_nearest() {
        let error = settings([("teir", "scalar")]).expect_err("there is no such option").to_string();
        assert!(error.contains("tier"), "{error}");
    }
}
