//! The one error type of the workspace.

use std::fmt;

/// `std::result::Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with everything that a user needs to find it in the model or the session set-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A node got something that its op's definition does not allow.
    Node {
        /// The node's name in the model.
        node: String,
        /// `domain::op_type`.
        op: String,
        /// The input, output or attribute concerned, e.g. `input 3 (past_key)`.
        slot: String,
        /// What was found.
        got: String,
        /// What the definition asks for.
        expected: String,
    },
    /// The model file or one of its data files is damaged or missing.
    Model {
        /// The file or the part of the graph concerned.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A provider option has an unknown name or a bad value.
    Option {
        /// The option's name as given.
        name: String,
        /// The value as given.
        got: String,
        /// What would have been right.
        expected: String,
    },
    /// Memory could not be had.
    Memory {
        /// Bytes asked for.
        asked: usize,
        /// What they were for.
        purpose: String,
    },
    /// An ORT call failed.
    Ort {
        /// The API function's name.
        call: &'static str,
        /// ORT's own message.
        message: String,
    },
    /// A call of the CUDA driver failed.
    Cuda {
        /// The driver function's name.
        call: &'static str,
        /// The driver's error code.
        code: i32,
        /// The code's name and the driver's own text, or why there is no driver to call.
        message: String,
    },
    /// GPU memory could not be had.
    DeviceMemory {
        /// Bytes asked for.
        asked: usize,
        /// Bytes in use that count towards the limit.
        used: usize,
        /// Bytes still free on the device.
        free: usize,
        /// Bytes that may be in use: the device's memory, or less where an option says so.
        limit: usize,
        /// What they were for.
        purpose: String,
    },
    /// A broken invariant of this library: always a bug here, never the user's fault.
    Internal(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { node, op, slot, got, expected } => {
                write!(f, "node '{node}' ({op}), {slot}: got {got}, expected {expected}")
            }
            Self::Model { place, problem } => write!(f, "model: {place}: {problem}"),
            Self::Option { name, got, expected } => {
                write!(f, "provider option '{name}': got '{got}', expected {expected}")
            }
            Self::Memory { asked, purpose } => write!(f, "could not allocate {asked} bytes for {purpose}"),
            Self::Ort { call, message } => write!(f, "ORT call {call} failed: {message}"),
            Self::Cuda { call, message, .. } => write!(f, "CUDA call {call} failed: {message}"),
            Self::DeviceMemory { asked, used, free, limit, purpose } => write!(
                f,
                "could not allocate {asked} bytes of GPU memory for {purpose}: \
                 {used} bytes of at most {limit} are in use, {free} are free on the device"
            ),
            Self::Internal(what) => write!(f, "internal error, please report: {what}"),
        }
    }
}

impl std::error::Error for Error {}
