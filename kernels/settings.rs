//! What a session may choose.

use crate::experts::Share;
use std::fmt;
use std::str::FromStr;

/// How kernels are to run; filled from the provider options by the EP.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Instruction set of the SIMD kernels.
    pub tier: Tier,
    /// How many tasks a parallel loop starts at most; about the number of threads.
    pub chunks: usize,
    /// Whether structural fusions run.
    pub fusion: bool,
    /// Where kernels run.
    pub target: Target,
    /// The part of the experts that is in device memory; `None` for all of them.
    pub experts: Option<Share>,
}

/// Where kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The host's processor.
    Cpu,
    /// A CUDA device. Shapes are still computed by the host, from the inputs' shapes alone.
    Cuda,
}

impl Default for Settings {
    fn default() -> Self {
        Self { tier: Tier::best(), chunks: default_chunks(), fusion: true, target: Target::Cpu, experts: None }
    }
}

/// As many chunks as the process may use cores.
fn default_chunks() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// An instruction set that kernels are written for, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Portable Rust: the reference.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
}

impl Tier {
    /// Every tier, weakest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512Vnni];

    /// The strongest tier that this processor has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|t| t.is_available()).unwrap_or(Self::Scalar)
    }

    /// Whether this processor can run the tier.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            match self {
                Self::Scalar => true,
                Self::Avx2 => avx2,
                Self::Avx512Vnni => {
                    avx2 && has!("avx512f")
                        && has!("avx512bw")
                        && has!("avx512vl")
                        && has!("avx512dq")
                        && has!("avx512vnni")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Scalar
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512Vnni => "avx512vnni",
        })
    }
}

impl FromStr for Tier {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let tier = match s {
            "auto" => Self::best(),
            "scalar" => Self::Scalar,
            "avx2" => Self::Avx2,
            "avx512vnni" => Self::Avx512Vnni,
            _ => return Err("auto, scalar, avx2 or avx512vnni".into()),
        };
        if tier.is_available() {
            Ok(tier)
        } else {
            Err(format!("a tier that this processor has, at most {}", Self::best()))
        }
    }
}
