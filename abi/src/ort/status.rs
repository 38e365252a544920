//! Results across the C boundary: `OrtStatus` to [`Error`] and back, with no panic getting through.

use super::{Api, sys};
use crate::error::{Error, Result};
use std::any::Any;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls an `OrtApi` function that returns a status; gives `Result<()>`. Needs an `unsafe` block around it.
macro_rules! ort {
    ($api:expr, $f:ident($($arg:expr),* $(,)?)) => {{
        let api: $crate::ort::Api = $api;
        let status = ((*api.ort()).$f)($($arg),*);
        api.check(stringify!($f), status)
    }};
}
/// The same for an `OrtEpApi` function.
macro_rules! ort_ep {
    ($api:expr, $f:ident($($arg:expr),* $(,)?)) => {{
        let api: $crate::ort::Api = $api;
        let status = ((*api.ep()).$f)($($arg),*);
        api.check(stringify!($f), status)
    }};
}
pub(crate) use {ort, ort_ep};

impl Api {
    /// Turns a status that ORT returned into a `Result`, and releases it.
    ///
    /// # Safety
    /// `status` is null or a status that the caller owns.
    pub(crate) unsafe fn check(self, call: &'static str, status: sys::OrtStatusPtr) -> Result<()> {
        if status.0.is_null() {
            return Ok(());
        }
        // SAFETY: the status is live until it is released below.
        let message = unsafe { string_from(((*self.ort()).GetErrorMessage)(status.0)) };
        // SAFETY: owned by the caller, not used again.
        unsafe { ((*self.ort()).ReleaseStatus)(status.0) };
        Err(Error::Ort { call, message })
    }

    /// A status of this error.
    ///
    /// Never `ORT_EP_FAIL`: Python would answer it by building the session anew on the CPU.
    pub(crate) fn status(self, error: &Error) -> sys::OrtStatusPtr {
        let code = match error {
            Error::Option { .. } => sys::OrtErrorCode::ORT_INVALID_ARGUMENT,
            _ => sys::OrtErrorCode::ORT_FAIL,
        };
        let message = c_string(&error.to_string());
        // SAFETY: `CreateStatus` is slot 0 of every version, and copies the message.
        unsafe { ((*self.ort()).CreateStatus)(code, message.as_ptr()) }
    }

    /// Runs the body of a callback that returns a status; panics become errors too.
    pub(crate) fn guard(self, callback: &'static str, body: impl FnOnce() -> Result<()>) -> sys::OrtStatusPtr {
        match caught(callback, body) {
            Ok(()) => sys::OrtStatusPtr::default(),
            Err(error) => self.status(&error),
        }
    }
}

/// Runs `body`, and turns a panic into an error.
pub(crate) fn caught<T>(callback: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => Err(Error::Internal(format!("panic in {callback}: {}", panic_text(&*payload)))),
    }
}

/// Runs the body of a callback that cannot report errors; `fallback` stands in after a panic.
pub(crate) fn caught_or<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(fallback)
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "of an unknown kind"
    }
}

/// A C string; a NUL inside becomes U+FFFD.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).expect("NULs were replaced")
}

/// The text at `ptr`, or an empty one when null; bytes that are not UTF-8 become U+FFFD.
///
/// # Safety
/// `ptr` is null or points to a NUL-terminated string.
pub(crate) unsafe fn string_from(ptr: *const c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned()
}

/// `&*ptr::slice_from_raw_parts(ptr, len)`, with null allowed when `len` is 0.
///
/// # Safety
/// Unless `len` is 0, `ptr` points to `len` initialised `T` that outlive `'a`.
pub(crate) unsafe fn slice_from<'a, T>(ptr: *const T, len: usize) -> &'a [T] {
    match len {
        0 => &[],
        // SAFETY: the caller vouches for it.
        _ => unsafe { std::slice::from_raw_parts(ptr, len) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors_with_their_text() {
        let silent = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let literal = caught::<()>("Compute", || panic!("boom"));
        let formatted = caught::<()>("Compute", || panic!("boom {}", 2));
        let other = caught::<()>("Compute", || std::panic::panic_any(7));
        let fallback = caught_or(false, || panic!("boom"));
        std::panic::set_hook(silent);
        assert_eq!(literal, Err(Error::Internal("panic in Compute: boom".into())));
        assert_eq!(formatted, Err(Error::Internal("panic in Compute: boom 2".into())));
        assert_eq!(other, Err(Error::Internal("panic in Compute: of an unknown kind".into())));
        assert!(!fallback);
    }

    #[test]
    fn c_strings_survive_nul_bytes() {
        assert_eq!(c_string("a\0b").to_string_lossy(), "a\u{fffd}b");
    }
}
