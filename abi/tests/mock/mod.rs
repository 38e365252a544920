//! A host that stands in for ORT: it has only the functions that the library may call, and counts what it hands out.
//! Any other slot of the tables aborts the process.

use abi::ort::sys::{OrtApi, OrtApiBase, OrtEpApi, OrtStatusPtr};
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

mod graph;
pub use graph::{MockGraph, MockNode, MockType, MockValue};

/// Objects handed out and not yet released.
pub static LIVE: AtomicIsize = AtomicIsize::new(0);
/// The version that the library last asked `GetApi` for.
pub static ASKED: AtomicU32 = AtomicU32::new(0);
/// How many nodes each `AddNodesToFuse` named.
pub static FUSED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

static VERSION: Mutex<Option<CString>> = Mutex::new(None);
static ALONE: Mutex<()> = Mutex::new(());

/// The host: one test at a time.
pub struct Host {
    pub base: Box<OrtApiBase>,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    /// A host of this version.
    pub fn new(version: &str) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        *lock(&VERSION) = Some(CString::new(version).expect("no NUL"));
        lock(&FUSED).clear();
        ASKED.store(0, Ordering::SeqCst);
        let base = OrtApiBase { GetApi: get_api, GetVersionString: get_version };
        Self { base: Box::new(base), _alone: alone }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts `value` on the heap for the library to hold.
pub fn give<T>(value: T) -> *mut T {
    LIVE.fetch_add(1, Ordering::SeqCst);
    Box::into_raw(Box::new(value))
}

/// Takes back what [`give`] gave; null is fine.
pub unsafe fn take<T>(ptr: *mut T) {
    if !ptr.is_null() {
        LIVE.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: from `give`, taken once.
        drop(unsafe { Box::from_raw(ptr) });
    }
}

/// A status' code and text, and its release; `None` for success.
pub fn result(status: OrtStatusPtr) -> Option<(i32, String)> {
    let ptr = status.0.cast::<Status>();
    // SAFETY: null or made by `create_status`.
    unsafe {
        let seen = ptr.as_ref().map(|s| (s.0, s.1.to_string_lossy().into_owned()));
        take(ptr);
        seen
    }
}

struct Status(i32, CString);

/// Key-value pairs with the arrays that ORT shows.
#[derive(Default)]
pub struct Pairs {
    strings: Vec<(CString, CString)>,
    keys: Vec<*const c_char>,
    values: Vec<*const c_char>,
}

/// A hardware device: its kind.
pub struct Hardware(pub i32);

/// The session entries that `GetSessionOptionsConfigEntries` gives.
pub struct SessionEntries(pub Vec<(&'static str, &'static str)>);

pub const OK: OrtStatusPtr = OrtStatusPtr(std::ptr::null_mut());

unsafe extern "system" fn get_version() -> *const c_char {
    lock(&VERSION).as_ref().expect("a host was made").as_ptr()
}

unsafe extern "system" fn get_api(version: u32) -> *const OrtApi {
    ASKED.store(version, Ordering::SeqCst);
    if version == 0 {
        return std::ptr::null();
    }
    // Leaked: the tables of a runtime live as long as the process.
    let api = Box::leak(Box::new(trapped::<OrtApi>()));
    let api: *mut OrtApi = api.as_mut_ptr();
    macro_rules! set {
        ($($slot:ident = $f:path),* $(,)?) => {
            // SAFETY: each slot is a function pointer, and each function takes what ORT's takes; C enums are ints.
            unsafe { $((&raw mut (*api).$slot).cast::<*const c_void>().write($f as *const c_void);)* }
        };
    }
    set!(
        CreateStatus = create_status,
        GetErrorMessage = get_error_message,
        ReleaseStatus = release_status,
        GetEpApi = get_ep_api,
        CreateKeyValuePairs = create_pairs,
        AddKeyValuePair = add_pair,
        GetKeyValuePairs = get_pairs,
        ReleaseKeyValuePairs = release_pairs,
        HardwareDevice_Type = hardware_type,
        HardwareDevice_VendorId = hardware_number,
        HardwareDevice_DeviceId = hardware_number,
        HardwareDevice_Vendor = hardware_vendor,
        HardwareDevice_Metadata = hardware_metadata,
        GetSessionOptionsConfigEntries = session_entries,
        Logger_GetLoggingSeverityLevel = logger_level,
    );
    // SAFETY: the table is ours.
    unsafe { graph::fill(api) };
    api
}

unsafe extern "system" fn get_ep_api() -> *const OrtEpApi {
    let api = Box::leak(Box::new(trapped::<OrtEpApi>()));
    let api: *mut OrtEpApi = api.as_mut_ptr();
    macro_rules! set {
        ($($slot:ident = $f:path),* $(,)?) => {
            // SAFETY: as in `get_api`.
            unsafe { $((&raw mut (*api).$slot).cast::<*const c_void>().write($f as *const c_void);)* }
        };
    }
    set!(
        CreateEpDevice = create_ep_device,
        ReleaseEpDevice = release_ep_device,
        EpGraphSupportInfo_AddNodesToFuse = add_nodes_to_fuse,
    );
    api
}

/// A table whose every slot aborts.
fn trapped<T>() -> MaybeUninit<T> {
    extern "system" fn trap() {
        eprintln!("the library called a function that this host does not have");
        std::process::abort();
    }
    let mut table = MaybeUninit::<T>::uninit();
    let slots = table.as_mut_ptr().cast::<*const c_void>();
    for i in 0..size_of::<T>() / size_of::<usize>() {
        // SAFETY: the table is an array of function pointers.
        unsafe { slots.add(i).write(trap as *const c_void) };
    }
    table
}

unsafe extern "system" fn create_status(code: i32, text: *const c_char) -> *mut Status {
    // SAFETY: the library passes a string.
    give(Status(code, unsafe { CStr::from_ptr(text) }.to_owned()))
}

unsafe extern "system" fn get_error_message(status: *const Status) -> *const c_char {
    // SAFETY: the library passes a live status.
    unsafe { &*status }.1.as_ptr()
}

unsafe extern "system" fn release_status(status: *mut Status) {
    // SAFETY: from `create_status`.
    unsafe { take(status) }
}

/// A failure of a host function.
pub fn failure(text: &str) -> OrtStatusPtr {
    OrtStatusPtr(give(Status(1, CString::new(text).expect("no NUL"))).cast())
}

unsafe extern "system" fn create_pairs(out: *mut *mut Pairs) {
    // SAFETY: the library's out pointer.
    unsafe { out.write(give(Pairs::default())) }
}

unsafe extern "system" fn add_pair(pairs: *mut Pairs, key: *const c_char, value: *const c_char) {
    // SAFETY: the library passes live pairs and strings.
    unsafe {
        let pairs = &mut *pairs;
        let strings = (CStr::from_ptr(key).to_owned(), CStr::from_ptr(value).to_owned());
        pairs.keys.push(strings.0.as_ptr());
        pairs.values.push(strings.1.as_ptr());
        pairs.strings.push(strings);
    }
}

unsafe extern "system" fn get_pairs(
    pairs: *const Pairs,
    keys: *mut *const *const c_char,
    values: *mut *const *const c_char,
    len: *mut usize,
) {
    // SAFETY: the library passes live pairs and out pointers.
    unsafe {
        let pairs = &*pairs;
        keys.write(pairs.keys.as_ptr());
        values.write(pairs.values.as_ptr());
        len.write(pairs.keys.len());
    }
}

unsafe extern "system" fn release_pairs(pairs: *mut Pairs) {
    // SAFETY: from `create_pairs` or `session_entries`.
    unsafe { take(pairs) }
}

unsafe extern "system" fn hardware_type(device: *const Hardware) -> i32 {
    // SAFETY: the library passes a live device.
    unsafe { &*device }.0
}

unsafe extern "system" fn hardware_number(_device: *const Hardware) -> u32 {
    7
}

unsafe extern "system" fn hardware_vendor(_device: *const Hardware) -> *const c_char {
    c"mock".as_ptr()
}

unsafe extern "system" fn hardware_metadata(_device: *const Hardware) -> *const Pairs {
    std::ptr::null()
}

unsafe extern "system" fn session_entries(session: *const SessionEntries, out: *mut *mut Pairs) -> OrtStatusPtr {
    let pairs = give(Pairs::default());
    // SAFETY: the library passes the session that the test gave it.
    unsafe {
        for (key, value) in &(*session).0 {
            let (key, value) = (CString::new(*key).expect("no NUL"), CString::new(*value).expect("no NUL"));
            add_pair(pairs, key.as_ptr(), value.as_ptr());
        }
        out.write(pairs);
    }
    OK
}

unsafe extern "system" fn logger_level(_logger: *const c_void, out: *mut i32) -> OrtStatusPtr {
    // A level that no enum of today knows.
    // SAFETY: the library's out pointer.
    unsafe { out.write(99) };
    OK
}

unsafe extern "system" fn create_ep_device(
    _factory: *const c_void,
    _hardware: *const Hardware,
    _metadata: *const Pairs,
    _options: *const Pairs,
    out: *mut *mut u32,
) -> OrtStatusPtr {
    // SAFETY: the library's out pointer.
    unsafe { out.write(give(0u32)) };
    OK
}

unsafe extern "system" fn release_ep_device(device: *mut u32) {
    // SAFETY: from `create_ep_device`.
    unsafe { take(device) }
}

unsafe extern "system" fn add_nodes_to_fuse(
    _info: *const c_void,
    _nodes: *const *const MockNode,
    count: usize,
    options: *const abi::ort::sys::OrtNodeFusionOptions,
) -> OrtStatusPtr {
    // SAFETY: the library passes live options.
    assert!(unsafe { &*options }.drop_constant_initializers);
    lock(&FUSED).push(count);
    OK
}
