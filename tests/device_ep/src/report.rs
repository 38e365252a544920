//! What happened so far, for the tests to read.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::Mutex;

static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Counts an event.
pub fn count(event: &str) {
    let mut counts = COUNTS.lock().expect("no panic while locked");
    *counts.entry(event.to_owned()).or_default() += 1;
}

/// All counts as a JSON object, and live device blocks as "live_blocks". Free the string with [`device_ep_free`].
#[unsafe(no_mangle)]
pub extern "C" fn device_ep_report() -> *mut c_char {
    let counts = COUNTS.lock().expect("no panic while locked");
    let mut entries: Vec<_> = counts.iter().map(|(event, n)| format!("\"{event}\":{n}")).collect();
    entries.push(format!("\"live_blocks\":{}", crate::arena::arena().live()));
    let text = CString::new(format!("{{{}}}", entries.join(","))).expect("event names have no NUL");
    text.into_raw()
}

/// Frees what [`device_ep_report`] gave.
///
/// # Safety
/// `report` came from [`device_ep_report`] and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn device_ep_free(report: *mut c_char) {
    // SAFETY: the caller vouches for it.
    drop(unsafe { CString::from_raw(report) });
}

/// Sets all counts to 0.
#[unsafe(no_mangle)]
pub extern "C" fn device_ep_reset() {
    COUNTS.lock().expect("no panic while locked").clear();
}
