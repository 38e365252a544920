//! Which ORT this process runs on, and its function tables.

use super::sys;
use crate::error::{Error, Result};
use std::ffi::CStr;

/// The oldest ORT minor version that this library runs on.
pub const OLDEST_MINOR: u32 = 24;

/// The running ORT's function tables. A pointer pair: copy it freely.
#[derive(Clone, Copy)]
pub struct Api {
    ort: *const sys::OrtApi,
    ep: *const sys::OrtEpApi,
    minor: u32,
}

// SAFETY: both tables are constants of the runtime's image, and their functions may be called from any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

impl Api {
    /// Looks up the tables, and says whether they will do. Where they do not, they can still make statuses.
    ///
    /// # Safety
    /// `base` is null or the runtime's `OrtApiBase`.
    pub(crate) unsafe fn load(base: *const sys::OrtApiBase) -> (Option<Self>, Result<()>) {
        if base.is_null() {
            return (None, Err(Error::Internal("ORT passed no OrtApiBase".into())));
        }
        // SAFETY: the caller vouches for `base`; the string is a constant of the runtime.
        let version = unsafe { CStr::from_ptr(((*base).GetVersionString)()) }.to_string_lossy();
        let minor = minor_of(&version).unwrap_or(0);
        // A number above the runtime's own gives null and a line on stderr, so never ask for one.
        // SAFETY: the caller vouches for `base`.
        let ort = unsafe { ((*base).GetApi)(minor.min(sys::COMPILED)) };
        let mut api = Self { ort, ep: std::ptr::null(), minor };
        if minor < OLDEST_MINOR || ort.is_null() {
            let error = Error::Ort {
                call: "GetVersionString",
                message: format!("ONNX Runtime {version} is not supported, 1.{OLDEST_MINOR} or newer is needed"),
            };
            return ((!ort.is_null()).then_some(api), Err(error));
        }
        // SAFETY: `GetEpApi` exists since 1.22.
        api.ep = unsafe { ((*ort).GetEpApi)() }.cast();
        let usable = match api.ep.is_null() {
            true => Err(Error::Internal("this ORT was built without plugin EPs".into())),
            false => Ok(()),
        };
        (Some(api), usable)
    }

    /// The running ORT's minor version: 32 for 1.32.0.
    pub fn minor(self) -> u32 {
        self.minor
    }

    /// The main table. Only slots that exist in [`Self::minor`] may be read.
    pub(crate) fn ort(self) -> *const sys::OrtApi {
        self.ort
    }

    /// The EP table, never null.
    pub(crate) fn ep(self) -> *const sys::OrtEpApi {
        self.ep
    }
}

/// 32 from "1.32.0" or "1.32.0-dev"; `None` for another major version or no version at all.
fn minor_of(version: &str) -> Option<u32> {
    let mut parts = version.split('.');
    (parts.next()? == "1").then(|| parts.next()?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_version_of_every_form() {
        assert_eq!(minor_of("1.32.0"), Some(32));
        assert_eq!(minor_of("1.24.4-dev20250101"), Some(24));
        for bad in ["", "1", "2.0.0", "1.x.0", "main"] {
            assert_eq!(minor_of(bad), None, "{bad}");
        }
    }
}
