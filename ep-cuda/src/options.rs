//! The provider options.

use abi::options::{Kind, OptionDef, Options};
use abi::ort::SessionOptions;
use abi::{Error, Result};
use kernels::settings::{Settings, Target};

/// The name of ORT's own CUDA EP. Who registers this library under it may give that EP's options too.
pub const ORT_CUDA: &str = "CUDAExecutionProvider";

/// Every option that a session can give.
pub const OPTIONS: &[OptionDef] = &[
    OptionDef { name: "device_id", kind: Kind::Int { min: 0, max: 7 }, default: "0", help: "Number of the GPU" },
    OptionDef {
        name: "cuda_graph",
        kind: Kind::Choice(&["auto", "off", "strict"]),
        default: "auto",
        help: "Whether Runs launch CUDA graphs; strict makes a Run that cannot an error",
    },
    OptionDef {
        name: "enable_cuda_graph",
        kind: Kind::Bool,
        default: "0",
        help: "Whether ORT captures and replays whole Runs, on fixed addresses, by the Run option gpu_graph_id",
    },
    OptionDef {
        name: "memory_limit_bytes",
        kind: Kind::Int { min: 0, max: i64::MAX },
        default: "0",
        help: "Most memory of the GPU that this library takes while the session lives; 0 for all there is",
    },
    OptionDef {
        name: kernels::experts::OPTION,
        kind: Kind::Int { min: 0, max: i64::MAX },
        default: "0",
        help: "Most memory of the GPU for experts; those beyond lie in page-locked host memory and are fetched when tokens \
               go to them, by Runs without CUDA graphs; 0 for all experts on the GPU",
    },
    OptionDef { name: "fusion", kind: Kind::Bool, default: "1", help: "Whether nodes are merged into larger kernels" },
    OptionDef {
        name: "shared_memory_limit",
        kind: Kind::Int { min: 0, max: 1 << 20 },
        default: "0",
        help: "Most shared memory of a block, in bytes, to try how the kernels do on lesser GPUs; 0 for the GPU's own",
    },
    OptionDef {
        name: "launch_overlap",
        kind: Kind::Bool,
        default: "1",
        help: "Whether a kernel may start before its predecessor has ended (compute capability 9.0 and up)",
    },
    OptionDef {
        name: "user_compute_stream",
        kind: Kind::Text,
        default: "",
        help: "Address of a CUstream to run on, as a decimal number; it must outlive the session",
    },
];

/// Options of ORT's CUDA EP that have no counterpart here, or a default that is the only behaviour.
const FOREIGN: &[&str] = &[
    "has_user_compute_stream",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "cudnn_conv1d_pad_to_nc1d",
    "do_copy_in_default_stream",
    "default_memory_arena_cfg",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "tunable_op_enable",
    "tunable_op_tuning_enable",
    "tunable_op_max_tuning_duration_ms",
    "enable_skip_layer_norm_strict_mode",
    "prefer_nhwc",
    "use_ep_level_unified_stream",
    "use_tf32",
    "fuse_conv_bias",
    "sdpa_kernel",
];

/// How Runs use CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphMode {
    /// Where they can.
    Auto,
    /// Never.
    Off,
    /// Always; a Run that cannot is an error.
    Strict,
}

/// What a session chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    /// Number of the GPU.
    pub device: u32,
    /// How Runs use CUDA graphs.
    pub graphs: GraphMode,
    /// Whether ORT captures and replays Runs.
    pub ort_graphs: bool,
    /// Most device memory; 0 for no limit.
    pub memory_limit: usize,
    /// Most device memory for experts; 0 for no limit.
    pub expert_limit: usize,
    /// Whether structural fusions run.
    pub fusion: bool,
    /// Most shared memory of a block; 0 for the device's own.
    pub shared_memory_limit: u32,
    /// Whether kernels may start before their predecessors have ended.
    pub launch_overlap: bool,
    /// The address of the stream that the user wants all work on.
    pub user_stream: Option<usize>,
    /// Options of ORT's CUDA EP that were given and change nothing.
    pub ignored: Vec<String>,
}

/// What the session chose for the EP of this name.
///
/// # Errors
/// [`Error::Option`] for an unknown name, with the nearest known one, and for a value of the wrong kind.
pub fn choices(session: &SessionOptions, ep_name: &str) -> Result<Choices> {
    let foreign = if ep_name == ORT_CUDA { FOREIGN } else { &[] };
    let given: Vec<_> = session.provider(ep_name).collect();
    let options = Options::parse(OPTIONS, foreign, given.iter().copied())?;
    let number = |name: &str| options.int(name);
    let bounded = "the declaration bounds it";
    let last = |name: &str| given.iter().rev().find(|(key, _)| foreign.contains(key) && *key == name);
    let memory_limit = match (number("memory_limit_bytes"), last("gpu_mem_limit")) {
        (0, Some((name, value))) => their_limit(name, value)?,
        (own, _) => usize::try_from(own).expect(bounded),
    };
    // onnxruntime-genai gives the stream as a bare session entry.
    let stream = Some(options.text("user_compute_stream")).filter(|text| !text.is_empty());
    let stream = stream.or_else(|| session.get("user_compute_stream")).filter(|text| !text.is_empty());
    let ignored = given.iter().map(|(name, _)| *name).filter(|name| foreign.contains(name));
    let ignored = ignored.filter(|name| !["gpu_mem_limit", "has_user_compute_stream"].contains(name));
    Ok(Choices {
        device: u32::try_from(number("device_id")).expect(bounded),
        graphs: match options.text("cuda_graph") {
            "off" => GraphMode::Off,
            "strict" => GraphMode::Strict,
            _ => GraphMode::Auto,
        },
        ort_graphs: options.bool("enable_cuda_graph"),
        memory_limit,
        expert_limit: usize::try_from(number(kernels::experts::OPTION)).expect(bounded),
        fusion: options.bool("fusion"),
        shared_memory_limit: u32::try_from(number("shared_memory_limit")).expect(bounded),
        launch_overlap: options.bool("launch_overlap"),
        user_stream: stream.map(address).transpose()?.filter(|&address| address != 0),
        ignored: ignored.map(str::to_owned).collect(),
    })
}

/// What a claim depends on of the options that the user gave, for `explain`.
///
/// # Errors
/// [`Error::Option`] for an unknown name, with the nearest known one, and for a value of the wrong kind.
pub fn settings<'a>(given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Settings> {
    let options = Options::parse(OPTIONS, &[], given)?;
    Ok(Settings { fusion: options.bool("fusion"), target: Target::Cuda, ..Settings::default() })
}

/// ORT's limit, which is the largest number there is by default.
fn their_limit(name: &str, value: &str) -> Result<usize> {
    let limit = value.trim().parse::<usize>().map_err(|_| Error::Option {
        name: name.into(),
        got: value.into(),
        expected: "a whole number from 0".into(),
    })?;
    Ok(if limit == usize::MAX { 0 } else { limit })
}

fn address(text: &str) -> Result<usize> {
    text.trim().parse().map_err(|_| Error::Option {
        name: "user_compute_stream".into(),
        got: text.into(),
        expected: "the address of a CUstream as a decimal number".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(entries: &[(&str, &str)]) -> SessionOptions {
        let entries = entries.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        SessionOptions { entries, devices: Vec::new() }
    }

    fn of(name: &str, entries: &[(&str, &str)]) -> Result<Choices> {
        choices(&session(entries), name)
    }

    #[test]
    fn declarations_are_sound() {
        abi::options::check_declarations(OPTIONS);
        assert!(FOREIGN.iter().all(|name| OPTIONS.iter().all(|def| def.name != *name)));
    }

    #[test]
    fn options_become_choices() {
        let defaults = of("Ours", &[]).expect("no option is fine");
        let wanted = Choices {
            device: 0,
            graphs: GraphMode::Auto,
            ort_graphs: false,
            memory_limit: 0,
            expert_limit: 0,
            fusion: true,
            shared_memory_limit: 0,
            launch_overlap: true,
            user_stream: None,
            ignored: vec![],
        };
        assert_eq!(defaults, wanted);
        let given = [
            ("ep.ours.device_id", "3"),
            ("ep.ours.cuda_graph", "strict"),
            ("ep.ours.enable_cuda_graph", "True"),
            ("ep.ours.memory_limit_bytes", "12345678901"),
            ("ep.ours.expert_memory_limit_bytes", "23456789012"),
            ("ep.ours.fusion", "0"),
            ("ep.ours.shared_memory_limit", "49152"),
            ("ep.ours.user_compute_stream", "140737488355328"),
        ];
        let wanted = Choices {
            device: 3,
            graphs: GraphMode::Strict,
            ort_graphs: true,
            memory_limit: 12_345_678_901,
            expert_limit: 23_456_789_012,
            fusion: false,
            shared_memory_limit: 49152,
            launch_overlap: true,
            user_stream: Some(0x8000_0000_0000),
            ignored: vec![],
        };
        assert_eq!(of("Ours", &given), Ok(wanted));
    }

    #[test]
    fn options_of_orts_cuda_ep_are_known_under_its_name_alone() {
        let given = [
            ("ep.cuda.gpu_mem_limit", "1000000"),
            ("ep.cuda.arena_extend_strategy", "kSameAsRequested"),
            ("ep.cuda.enable_skip_layer_norm_strict_mode", "1"),
            ("ep.cuda.enable_cuda_graph", "1"),
            ("user_compute_stream", "4096"),
        ];
        let choices = of(ORT_CUDA, &given).expect("these are known");
        assert_eq!((choices.memory_limit, choices.ort_graphs, choices.user_stream), (1_000_000, true, Some(4096)));
        assert_eq!(choices.ignored, ["arena_extend_strategy", "enable_skip_layer_norm_strict_mode"]);
        let own = [("ep.cuda.gpu_mem_limit", "1"), ("ep.cuda.memory_limit_bytes", "2")];
        assert_eq!(of(ORT_CUDA, &own).expect("known").memory_limit, 2);
        let all = [("ep.cuda.gpu_mem_limit", "18446744073709551615")];
        assert_eq!(of(ORT_CUDA, &all).expect("known").memory_limit, 0);
        let error = of("Ours", &[("ep.ours.gpu_mem_limit", "1")]).expect_err("not ours").to_string();
        assert!(error.contains("memory_limit_bytes"), "{error}");
    }

    #[test]
    fn explain_claims_for_cuda() {
        let settings = settings([("fusion", "0")]).expect("it is declared");
        assert_eq!((settings.target, settings.fusion), (Target::Cuda, false));
    }

    #[test]
    fn bad_values_say_what_would_be_right() {
        for (name, key, value, wanted) in [
            ("Ours", "ep.ours.device_id", "8", "a whole number from 0 to 7"),
            ("Ours", "ep.ours.expert_memory_limit_bytes", "-1", "a whole number from 0"),
            ("Ours", "ep.ours.expert_memory_limit_bytes", "half", "a whole number from 0"),
            ("Ours", "ep.ours.cuda_graph", "on", "one of auto, off, strict"),
            ("Ours", "ep.ours.user_compute_stream", "0x10", "as a decimal number"),
            ("Ours", "user_compute_stream", "-1", "as a decimal number"),
            (ORT_CUDA, "ep.cuda.gpu_mem_limit", "all", "a whole number from 0"),
            ("Ours", "ep.ours.cuda_grph", "off", "did you mean 'cuda_graph'?"),
        ] {
            let error = of(name, &[(key, value)]).expect_err("a bad value").to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let none = of("Ours", &[("user_compute_stream", "0")]).expect("no stream");
        assert_eq!(none.user_stream, None);
    }
}
