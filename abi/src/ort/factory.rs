//! What ORT loads: the exported functions, and the factory behind them.

use super::device::{OwnedMemoryInfo, OwnedPairs};
use super::ep::EpObject;
use super::memcpy::MemcpyRegistry;
use super::memory::{AllocatorSource, DataTransfer, create_allocator, create_data_transfer, release_allocator};
use super::status::{c_string, caught, caught_or, ort, ort_ep, slice_from, string_from};
use super::stream::{StreamSource, create_stream};
use super::{Api, Ep, HardwareDevice, Logger, MemoryDevice, MemoryInfo, SessionOptions, sys};
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Makes an EP for each session. It may outlive its registration, since sessions do.
pub trait Factory: Send + Sync {
    /// The EP's name, normally [`Registration::ep_name`].
    fn name(&self) -> &str;

    /// Who makes the EP.
    fn vendor(&self) -> &str;

    /// The vendor's PCI id; 0 without one.
    fn vendor_id(&self) -> u32 {
        0
    }

    /// The EP's version, as semver.
    fn version(&self) -> &str;

    /// Which of ORT's devices the EP can use. With no device for it, prefer an empty list to an error: a failed
    /// registration leaves ORT half-registered.
    ///
    /// # Errors
    /// Fail the registration.
    fn devices(&self, hardware: &[HardwareDevice]) -> Result<Vec<Device>>;

    /// An EP for one session. Some sessions never claim anything: do the costly parts later.
    ///
    /// # Errors
    /// Fail the session.
    fn create_ep(&self, session: &SessionOptions, logger: Logger) -> Result<Box<dyn Ep>>;

    /// Allocators of the memories that [`Self::devices`] lists. ORT asks for them at registration already.
    fn allocators(&self) -> Option<&dyn AllocatorSource> {
        None
    }

    /// Copies between host and device.
    fn data_transfer(&self) -> Option<Arc<dyn DataTransfer>> {
        None
    }

    /// Streams; without them every call is synchronous.
    fn streams(&self) -> Option<&dyn StreamSource> {
        None
    }
}

/// A device that the EP can use.
#[derive(Debug, Clone, Default)]
pub struct Device {
    /// Index into the hardware list that [`Factory::devices`] got.
    pub hardware: usize,
    /// What users see of the device.
    pub metadata: Vec<(String, String)>,
    /// Provider options that sessions on this device start from.
    pub options: Vec<(String, String)>,
    /// The memories that tensors can be in, besides the host's.
    pub memory: Vec<MemoryInfo>,
}

/// How the library was registered.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The name that the user gave.
    pub registered_name: String,
    /// The running ORT's minor version.
    pub ort_minor: u32,
    /// The log of ORT's environment.
    pub logger: Option<Logger>,
}

impl Registration {
    /// The name that the EP goes by: `default`, unless the user registered one that ends in "ExecutionProvider".
    pub fn ep_name(&self, default: &str) -> String {
        let named = self.registered_name.ends_with("ExecutionProvider");
        if named { self.registered_name.clone() } else { default.to_owned() }
    }
}

/// Exports `CreateEpFactories` and `ReleaseEpFactory`.
///
/// The argument is a `fn(&Registration) -> Result<Box<dyn Factory>>`.
#[macro_export]
macro_rules! export_factory {
    ($make:path) => {
        /// ORT calls this when the library is registered.
        ///
        /// # Safety
        /// Only ORT may call this.
        #[unsafe(no_mangle)]
        pub unsafe extern "system" fn CreateEpFactories(
            registered_name: *const ::std::ffi::c_char,
            api: *const $crate::ort::sys::OrtApiBase,
            logger: *const $crate::ort::sys::OrtLogger,
            factories: *mut *mut $crate::ort::sys::OrtEpFactory,
            room: usize,
            count: *mut usize,
        ) -> $crate::ort::sys::OrtStatusPtr {
            // SAFETY: the arguments are ORT's.
            unsafe { $crate::ort::create_factories(registered_name, api, logger, factories, room, count, $make) }
        }

        /// ORT calls this when the library is unregistered.
        ///
        /// # Safety
        /// Only ORT may call this.
        #[unsafe(no_mangle)]
        pub unsafe extern "system" fn ReleaseEpFactory(
            factory: *mut $crate::ort::sys::OrtEpFactory,
        ) -> $crate::ort::sys::OrtStatusPtr {
            // SAFETY: the argument is ORT's.
            unsafe { $crate::ort::release_factory(factory) }
        }
    };
}

/// What a factory's objects share, alive as long as any of them.
pub(crate) struct FactoryState {
    api: Api,
    name: CString,
    vendor: CString,
    version: CString,
    logger: Logger,
    factory: Box<dyn Factory>,
    /// ORT keeps pointers to these in its devices and allocators.
    memory_infos: Mutex<Vec<OwnedMemoryInfo>>,
    /// Made when a session first asks; ORT keeps pointers to it.
    memcpy: OnceLock<Result<MemcpyRegistry>>,
}

impl FactoryState {
    pub(crate) fn api(&self) -> Api {
        self.api
    }

    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }

    pub(crate) fn logger(&self) -> Logger {
        self.logger
    }

    pub(crate) fn data_transfer(&self) -> Option<Arc<dyn DataTransfer>> {
        self.factory.data_transfer()
    }

    /// The registry of the Memcpy kernels.
    pub(crate) fn memcpy(self: &Arc<Self>) -> Result<*const sys::OrtKernelRegistry> {
        self.memcpy.get_or_init(|| MemcpyRegistry::new(self)).as_ref().map(|made| made.raw()).map_err(Clone::clone)
    }

    /// Our own memory info of that place.
    pub(crate) fn memory_info(&self, memory: MemoryDevice) -> Option<*const sys::OrtMemoryInfo> {
        let infos = lock(&self.memory_infos);
        infos.iter().find(|info| info.device == memory).map(|info| info.raw.cast_const())
    }

    /// One `OrtEpDevice`, owned by the caller.
    fn ep_device(
        &self,
        factory: *mut sys::OrtEpFactory,
        hardware: *const sys::OrtHardwareDevice,
        device: &Device,
    ) -> Result<*mut sys::OrtEpDevice> {
        let api = self.api;
        let metadata = OwnedPairs::new(api, &device.metadata);
        let options = OwnedPairs::new(api, &device.options);
        let mut made = std::ptr::null_mut();
        // SAFETY: all arguments are live; ORT copies the pairs.
        unsafe {
            ort_ep!(api, CreateEpDevice(factory, hardware, metadata.raw, options.raw, &raw mut made))?;
        }
        let add = |info: &MemoryInfo| -> Result<()> {
            let info = OwnedMemoryInfo::new(api, info)?;
            // SAFETY: ORT keeps the pointer, so the info stays in `memory_infos` for good.
            unsafe { ort_ep!(api, EpDevice_AddAllocatorInfo(made, info.raw))? };
            lock(&self.memory_infos).push(info);
            Ok(())
        };
        if let Err(error) = device.memory.iter().try_for_each(add) {
            // SAFETY: made above, given to nobody.
            unsafe { ((*api.ep()).ReleaseEpDevice)(made) };
            return Err(error);
        }
        Ok(made)
    }
}

/// What ORT holds as an `OrtEpFactory`.
#[repr(C)]
struct FactoryObject {
    c: sys::OrtEpFactory,
    state: Arc<FactoryState>,
}

/// A factory that ORT released. Sessions may still use it: they release their EPs through it.
struct Released(*mut FactoryObject);

// SAFETY: what is left to do is to read the state's count and to free the object, on any thread.
unsafe impl Send for Released {}

static RELEASED: Mutex<Vec<Released>> = Mutex::new(Vec::new());

/// The body of `CreateEpFactories`.
///
/// # Safety
/// The arguments are those that ORT passed to `CreateEpFactories`.
pub unsafe fn create_factories(
    registered_name: *const c_char,
    base: *const sys::OrtApiBase,
    logger: *const sys::OrtLogger,
    factories: *mut *mut sys::OrtEpFactory,
    room: usize,
    count: *mut usize,
    make: fn(&Registration) -> Result<Box<dyn Factory>>,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's argument.
    let (api, usable) = unsafe { Api::load(base) };
    let Some(api) = api else {
        // Without a table there is no status to return; ORT gets no factory.
        eprintln!("{}", usable.err().unwrap_or_else(|| Error::Internal("no ORT API".into())));
        // SAFETY: ORT's argument.
        unsafe { count.write(0) };
        return sys::OrtStatusPtr::default();
    };
    if let Err(error) = usable {
        return api.status(&error);
    }
    api.guard("CreateEpFactories", || {
        keep_loaded();
        // SAFETY: ORT's arguments; the environment's logger outlives the registration.
        let (registered_name, logger) = unsafe { (string_from(registered_name), Logger::new(api, logger)) };
        if room == 0 {
            return Err(Error::Internal("ORT has no room for a factory".into()));
        }
        let factory = make(&Registration { registered_name, ort_minor: api.minor(), logger: Some(logger) })?;
        let object = FactoryObject::new(api, logger, factory);
        // SAFETY: ORT's arguments, with room for one factory.
        unsafe {
            factories.write(Box::into_raw(Box::new(object)).cast());
            count.write(1);
        }
        sweep();
        Ok(())
    })
}

/// The body of `ReleaseEpFactory`.
///
/// # Safety
/// `factory` came from [`create_factories`] and is released once.
pub unsafe fn release_factory(factory: *mut sys::OrtEpFactory) -> sys::OrtStatusPtr {
    // Freed by a later registration's sweep, when no session needs it any more.
    caught_or((), || lock(&RELEASED).push(Released(factory.cast())));
    sys::OrtStatusPtr::default()
}

/// Frees released factories that no EP or allocator needs.
fn sweep() {
    lock(&RELEASED).retain(|&Released(object)| {
        // SAFETY: the list holds objects that are live until they leave it here, each once.
        let needed = unsafe { Arc::strong_count(&(*object).state) } > 1;
        if !needed {
            // SAFETY: as above; made by `Box::into_raw`, and ORT is done with it.
            drop(unsafe { Box::from_raw(object) });
        }
        needed
    });
}

/// Locks, whatever a panic left behind: all that is guarded here stays whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps this library's code mapped: ORT unloads it at unregistration even while sessions call into it, and threads may
/// still have destructors here to run.
fn keep_loaded() {
    // SAFETY: `info` is plain data that `dladdr` fills; the name is a string of the loader's, and opening the library
    // that is running already runs no code.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        let here: fn() = keep_loaded;
        if libc::dladdr(here as *const libc::c_void, &raw mut info) != 0 && !info.dli_fname.is_null() {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

impl FactoryObject {
    fn new(api: Api, logger: Logger, factory: Box<dyn Factory>) -> Self {
        let c = sys::OrtEpFactory {
            ort_version_supported: sys::COMPILED,
            GetName: Some(get_name),
            GetVendor: Some(get_vendor),
            GetSupportedDevices: Some(get_supported_devices),
            CreateEp: Some(create_ep),
            ReleaseEp: Some(release_ep),
            GetVendorId: Some(get_vendor_id),
            GetVersion: Some(get_version),
            CreateAllocator: Some(factory_allocator),
            ReleaseAllocator: Some(factory_release_allocator),
            // ORT calls this one without a null check.
            CreateDataTransfer: Some(factory_data_transfer),
            IsStreamAware: Some(is_stream_aware),
            CreateSyncStreamForDevice: Some(factory_stream),
            ..Default::default()
        };
        let state = FactoryState {
            api,
            name: c_string(factory.name()),
            vendor: c_string(factory.vendor()),
            version: c_string(factory.version()),
            logger,
            factory,
            memory_infos: Mutex::default(),
            memcpy: OnceLock::new(),
        };
        Self { c, state: Arc::new(state) }
    }

    /// # Safety
    /// `this` was made by [`create_factories`] and is live for `'a`.
    unsafe fn get<'a>(this: *const sys::OrtEpFactory) -> &'a Arc<FactoryState> {
        // SAFETY: the caller vouches for it, and nothing borrows the object mutably.
        unsafe { &(*this.cast::<Self>()).state }
    }
}

// Every callback below: ORT passes the object that it got from `CreateEpFactories`, and arguments that live as long
// as the call.

unsafe extern "system" fn get_name(this: *const sys::OrtEpFactory) -> *const c_char {
    // SAFETY: ORT's contract, see above.
    unsafe { FactoryObject::get(this) }.name.as_ptr()
}

unsafe extern "system" fn get_vendor(this: *const sys::OrtEpFactory) -> *const c_char {
    // SAFETY: ORT's contract, see above.
    unsafe { FactoryObject::get(this) }.vendor.as_ptr()
}

unsafe extern "system" fn get_version(this: *const sys::OrtEpFactory) -> *const c_char {
    // SAFETY: ORT's contract, see above.
    unsafe { FactoryObject::get(this) }.version.as_ptr()
}

unsafe extern "system" fn get_vendor_id(this: *const sys::OrtEpFactory) -> u32 {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    caught_or(0, || state.factory.vendor_id())
}

unsafe extern "system" fn get_supported_devices(
    this: *mut sys::OrtEpFactory,
    hardware: *const *const sys::OrtHardwareDevice,
    hardware_count: usize,
    devices: *mut *mut sys::OrtEpDevice,
    room: usize,
    count: *mut usize,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    state.api.guard("GetSupportedDevices", || {
        // SAFETY: the array has `hardware_count` live devices.
        let (raw, hardware): (_, Vec<_>) = unsafe {
            count.write(0);
            let raw = slice_from(hardware, hardware_count);
            (raw, raw.iter().map(|&device| HardwareDevice::read(state.api, device)).collect())
        };
        let offered = state.factory.devices(&hardware)?;
        if offered.len() > room {
            let message = format!("{} devices, where ORT has room for {room}", offered.len());
            return Err(Error::Internal(message));
        }
        for (i, device) in offered.iter().enumerate() {
            let hardware = *raw.get(device.hardware).ok_or_else(|| {
                Error::Internal(format!("a device on hardware {} of {hardware_count}", device.hardware))
            })?;
            let made = state.ep_device(this, hardware, device)?;
            // SAFETY: there is room; ORT owns the devices that it has been told of.
            unsafe {
                devices.add(i).write(made);
                count.write(i + 1);
            }
        }
        Ok(())
    })
}

unsafe extern "system" fn create_ep(
    this: *mut sys::OrtEpFactory,
    devices: *const *const sys::OrtHardwareDevice,
    _metadata: *const *const sys::OrtKeyValuePairs,
    count: usize,
    options: *const sys::OrtSessionOptions,
    logger: *const sys::OrtLogger,
    out: *mut *mut sys::OrtEp,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    let api = state.api;
    api.guard("CreateEp", || {
        let mut entries = std::ptr::null_mut();
        // SAFETY: the array has `count` live devices, the session's logger outlives the EP, and the entries are a copy
        // that is ours.
        let (session, logger) = unsafe {
            ort!(api, GetSessionOptionsConfigEntries(options, &raw mut entries))?;
            let entries = OwnedPairs::adopt(api, entries).read();
            let devices = slice_from(devices, count);
            let devices = devices.iter().map(|&device| HardwareDevice::read(api, device)).collect();
            (SessionOptions { entries, devices }, Logger::new(api, logger))
        };
        let ep = caught("CreateEp", || {
            refuse_context_model(&session)?;
            state.factory.create_ep(&session, logger)
        });
        // Older ORTs, asked from Python, would answer an error here by building the session on the CPU.
        let ep = if api.minor() < 32 { ep } else { Ok(ep?) };
        // SAFETY: ORT's contract, see above.
        unsafe { out.write(EpObject::create(api, state.clone(), logger, ep)) };
        Ok(())
    })
}

/// ORT expects nodes with a compiled form from an EP that is asked to write a context model; without them it crashes or
/// writes a useless one.
fn refuse_context_model(session: &SessionOptions) -> Result<()> {
    match session.get("ep.context_enable") {
        None | Some("0") => Ok(()),
        Some(got) => Err(Error::Option {
            name: "ep.context_enable".into(),
            got: got.into(),
            expected: "0: this EP does not write compiled models".into(),
        }),
    }
}

unsafe extern "system" fn release_ep(_this: *mut sys::OrtEpFactory, ep: *mut sys::OrtEp) {
    if !ep.is_null() {
        // SAFETY: ORT's contract, see above; released once.
        unsafe { EpObject::release(ep) }
    }
}

unsafe extern "system" fn factory_allocator(
    this: *mut sys::OrtEpFactory,
    info: *const sys::OrtMemoryInfo,
    _options: *const sys::OrtKeyValuePairs,
    out: *mut *mut sys::OrtAllocator,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    // SAFETY: as above.
    state.api.guard("CreateAllocator", || unsafe { create_allocator(state, state.factory.allocators(), info, out) })
}

unsafe extern "system" fn factory_release_allocator(_this: *mut sys::OrtEpFactory, allocator: *mut sys::OrtAllocator) {
    // SAFETY: ORT's contract, see above; released once.
    unsafe { release_allocator(allocator) }
}

unsafe extern "system" fn factory_data_transfer(
    this: *mut sys::OrtEpFactory,
    out: *mut *mut sys::OrtDataTransferImpl,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    state.api.guard("CreateDataTransfer", || {
        let transfer = state.factory.data_transfer();
        let made = transfer.map_or(std::ptr::null_mut(), |t| create_data_transfer(state.api, t));
        // SAFETY: as above.
        unsafe { out.write(made) };
        Ok(())
    })
}

unsafe extern "system" fn is_stream_aware(this: *const sys::OrtEpFactory) -> bool {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    caught_or(false, || state.factory.streams().is_some())
}

unsafe extern "system" fn factory_stream(
    this: *mut sys::OrtEpFactory,
    device: *const sys::OrtMemoryDevice,
    _options: *const sys::OrtKeyValuePairs,
    out: *mut *mut sys::OrtSyncStreamImpl,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let state = unsafe { FactoryObject::get(this) };
    // SAFETY: as above.
    state.api.guard("CreateSyncStreamForDevice", || unsafe {
        create_stream(state.api, state.factory.streams(), device, out)
    })
}
