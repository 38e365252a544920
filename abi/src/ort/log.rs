//! ORT's log.

use super::status::c_string;
use super::{Api, sys};
use std::fmt;

/// How severe a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)] // ORT's own names
pub enum Level {
    Verbose,
    Info,
    Warning,
    Error,
}

/// Where messages to the user go: the session's log or the environment's.
#[derive(Clone, Copy)]
pub struct Logger {
    api: Api,
    raw: *const sys::OrtLogger,
}

// SAFETY: ORT's loggers may be used from any thread.
unsafe impl Send for Logger {}
// SAFETY: as above.
unsafe impl Sync for Logger {}

impl fmt::Debug for Logger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Logger").field(&self.raw).finish()
    }
}

impl Logger {
    /// # Safety
    /// `raw` is null or a logger that outlives every copy of the result.
    pub(crate) unsafe fn new(api: Api, raw: *const sys::OrtLogger) -> Self {
        Self { api, raw }
    }

    /// Whether a message of this level would be written.
    pub fn enabled(&self, level: Level) -> bool {
        if self.raw.is_null() {
            return false;
        }
        // An integer, since a newer runtime may know more levels than the enum.
        let mut lowest = 0i32;
        // SAFETY: the logger is live, and the out pointer has the enum's size.
        let asked = unsafe {
            let out = (&raw mut lowest).cast();
            super::status::ort!(self.api, Logger_GetLoggingSeverityLevel(self.raw, out))
        };
        asked.is_ok() && lowest <= level as i32
    }

    /// Writes a message, formatted only if the level is enabled.
    pub fn log(&self, level: Level, message: fmt::Arguments<'_>) {
        if !self.enabled(level) {
            return;
        }
        let severity = match level {
            Level::Verbose => sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_VERBOSE,
            Level::Info => sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_INFO,
            Level::Warning => sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING,
            Level::Error => sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR,
        };
        let text = c_string(&message.to_string());
        // SAFETY: the logger is live, and ORT copies the strings. A message that cannot be written is lost.
        let _ = unsafe {
            let (file, function) = (c"nxrt".as_ptr(), c"log".as_ptr());
            super::status::ort!(self.api, Logger_LogMessage(self.raw, severity, text.as_ptr(), file, 0, function))
        };
    }
}
