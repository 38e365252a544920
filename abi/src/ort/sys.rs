//! The plugin-EP structs that ort-sys leaves opaque, in the field order of ORT's public header.
//!
//! A struct may be longer than what the running ORT knows: it ignores the tail. [`OrtEpApi`] is the other way round:
//! a slot past what the running ORT has must not be read, so every use is gated by [`super::Api::minor`].
#![allow(non_snake_case, missing_docs)]

pub use ort_sys::{
    OrtAllocator, OrtAllocatorType, OrtApi, OrtApiBase, OrtDeviceMemoryType, OrtEpDevice, OrtErrorCode, OrtGraph,
    OrtHardwareDevice, OrtKernelContext, OrtKernelInfo, OrtKeyValuePairs, OrtLogger, OrtLoggingLevel, OrtMemType,
    OrtMemoryInfo, OrtMemoryInfoDeviceType, OrtNode, OrtOpAttr, OrtOpAttrType, OrtRunOptions, OrtSessionOptions,
    OrtStatus, OrtStatusPtr, OrtSyncStream, OrtTensorTypeAndShapeInfo, OrtTypeInfo, OrtValue, OrtValueInfo,
};
use std::ffi::{c_char, c_int, c_void};

/// What structs of ours say they were compiled against: the newest header this file follows.
pub const COMPILED: u32 = 31;

/// The `OrtGraphCaptureNodeAssignmentPolicy` that allows no node on ORT's CPU EP.
pub const ALL_NODES_ON_EP: c_int = 0;

macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub struct $name { _opaque: [u8; 0] }
    )*};
}
opaque!(
    OrtEpGraphSupportInfo,
    OrtMemoryDevice,
    OrtNodeComputeContext,
    OrtKernelRegistry,
    OrtKernelDefBuilder,
    OrtKernelDef,
    OrtDataType,
    OrtEpProfilerImpl
);

/// A slot that this library neither fills nor calls.
pub type Unused = Option<unsafe extern "system" fn()>;

/// Declares a struct of one `u32` and then function slots, and asserts the offset of each.
macro_rules! callbacks {
    ($(#[$doc:meta])* $name:ident { $($field:ident : $ty:ty),* $(,)? } $len:literal) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Default, Clone, Copy)]
        pub struct $name {
            pub ort_version_supported: u32,
            $(pub $field: $ty,)*
        }
        const _: () = {
            let mut next = size_of::<usize>();
            $(
                assert!(std::mem::offset_of!($name, $field) == next);
                assert!(size_of::<$ty>() == size_of::<usize>());
                next += size_of::<usize>();
            )*
            assert!(next == size_of::<$name>());
            assert!(size_of::<$name>() == ($len + 1) * size_of::<usize>());
        };
    };
}

callbacks! {
    /// What makes EPs; one a registration.
    OrtEpFactory {
        GetName: Option<unsafe extern "system" fn(*const OrtEpFactory) -> *const c_char>,
        GetVendor: Option<unsafe extern "system" fn(*const OrtEpFactory) -> *const c_char>,
        GetSupportedDevices: Option<unsafe extern "system" fn(*mut OrtEpFactory, *const *const OrtHardwareDevice,
            usize, *mut *mut OrtEpDevice, usize, *mut usize) -> OrtStatusPtr>,
        CreateEp: Option<unsafe extern "system" fn(*mut OrtEpFactory, *const *const OrtHardwareDevice,
            *const *const OrtKeyValuePairs, usize, *const OrtSessionOptions, *const OrtLogger, *mut *mut OrtEp)
            -> OrtStatusPtr>,
        ReleaseEp: Option<unsafe extern "system" fn(*mut OrtEpFactory, *mut OrtEp)>,
        GetVendorId: Option<unsafe extern "system" fn(*const OrtEpFactory) -> u32>,
        GetVersion: Option<unsafe extern "system" fn(*const OrtEpFactory) -> *const c_char>,
        ValidateCompiledModelCompatibilityInfo: Unused,
        CreateAllocator: Option<unsafe extern "system" fn(*mut OrtEpFactory, *const OrtMemoryInfo,
            *const OrtKeyValuePairs, *mut *mut OrtAllocator) -> OrtStatusPtr>,
        ReleaseAllocator: Option<unsafe extern "system" fn(*mut OrtEpFactory, *mut OrtAllocator)>,
        CreateDataTransfer: Option<unsafe extern "system" fn(*mut OrtEpFactory, *mut *mut OrtDataTransferImpl)
            -> OrtStatusPtr>,
        IsStreamAware: Option<unsafe extern "system" fn(*const OrtEpFactory) -> bool>,
        CreateSyncStreamForDevice: Option<unsafe extern "system" fn(*mut OrtEpFactory, *const OrtMemoryDevice,
            *const OrtKeyValuePairs, *mut *mut OrtSyncStreamImpl) -> OrtStatusPtr>,
        GetHardwareDeviceIncompatibilityDetails: Unused,
        CreateExternalResourceImporterForDevice: Unused,
        GetNumCustomOpDomains: Unused,
        GetCustomOpDomains: Unused,
        InitGraphicsInterop: Unused,
        DeinitGraphicsInterop: Unused,
        SelectBestModelCandidate: Unused,
    } 20
}

callbacks! {
    /// One EP of one session.
    OrtEp {
        GetName: Option<unsafe extern "system" fn(*const OrtEp) -> *const c_char>,
        GetCapability: Option<unsafe extern "system" fn(*mut OrtEp, *const OrtGraph, *mut OrtEpGraphSupportInfo)
            -> OrtStatusPtr>,
        Compile: Option<unsafe extern "system" fn(*mut OrtEp, *const *const OrtGraph, *const *const OrtNode, usize,
            *mut *mut OrtNodeComputeInfo, *mut *mut OrtNode) -> OrtStatusPtr>,
        ReleaseNodeComputeInfos: Option<unsafe extern "system" fn(*mut OrtEp, *mut *mut OrtNodeComputeInfo, usize)>,
        GetPreferredDataLayout: Unused,
        ShouldConvertDataLayoutForOp: Unused,
        SetDynamicOptions: Option<unsafe extern "system" fn(*mut OrtEp, *const *const c_char, *const *const c_char,
            usize) -> OrtStatusPtr>,
        OnRunStart: Option<unsafe extern "system" fn(*mut OrtEp, *const OrtRunOptions) -> OrtStatusPtr>,
        OnRunEnd: Option<unsafe extern "system" fn(*mut OrtEp, *const OrtRunOptions, bool) -> OrtStatusPtr>,
        CreateAllocator: Option<unsafe extern "system" fn(*mut OrtEp, *const OrtMemoryInfo, *mut *mut OrtAllocator)
            -> OrtStatusPtr>,
        CreateSyncStreamForDevice: Option<unsafe extern "system" fn(*mut OrtEp, *const OrtMemoryDevice,
            *mut *mut OrtSyncStreamImpl) -> OrtStatusPtr>,
        GetCompiledModelCompatibilityInfo: Unused,
        GetKernelRegistry: Option<unsafe extern "system" fn(*mut OrtEp, *mut *const OrtKernelRegistry)
            -> OrtStatusPtr>,
        IsConcurrentRunSupported: Option<unsafe extern "system" fn(*mut OrtEp, *mut bool) -> OrtStatusPtr>,
        Sync: Option<unsafe extern "system" fn(*mut OrtEp) -> OrtStatusPtr>,
        CreateProfiler: Option<unsafe extern "system" fn(*mut OrtEp, *mut *mut OrtEpProfilerImpl) -> OrtStatusPtr>,
        IsGraphCaptureEnabled: Option<unsafe extern "system" fn(*const OrtEp) -> bool>,
        IsGraphCaptured: Option<unsafe extern "system" fn(*const OrtEp, c_int) -> bool>,
        ReplayGraph: Option<unsafe extern "system" fn(*mut OrtEp, c_int) -> OrtStatusPtr>,
        GetGraphCaptureNodeAssignmentPolicy: Option<unsafe extern "system" fn(*const OrtEp) -> c_int>,
        GetAvailableResource: Unused,
        OnSessionInitializationEnd: Option<unsafe extern "system" fn(*mut OrtEp) -> OrtStatusPtr>,
        GetDefaultMemoryDevice: Option<unsafe extern "system" fn(*const OrtEp, *mut *const OrtMemoryDevice)
            -> OrtStatusPtr>,
        ReleaseCapturedGraph: Option<unsafe extern "system" fn(*mut OrtEp, c_int) -> OrtStatusPtr>,
        GetWeightlessSupport: Unused,
    } 25
}

callbacks! {
    /// One compiled fused node.
    OrtNodeComputeInfo {
        CreateState: Option<unsafe extern "system" fn(*mut OrtNodeComputeInfo, *mut OrtNodeComputeContext,
            *mut *mut c_void) -> OrtStatusPtr>,
        Compute: Option<unsafe extern "system" fn(*mut OrtNodeComputeInfo, *mut c_void, *mut OrtKernelContext)
            -> OrtStatusPtr>,
        ReleaseState: Option<unsafe extern "system" fn(*mut OrtNodeComputeInfo, *mut c_void)>,
    } 3
}

callbacks! {
    /// Copies between host and device.
    OrtDataTransferImpl {
        Release: Option<unsafe extern "system" fn(*mut OrtDataTransferImpl)>,
        CanCopy: Option<unsafe extern "system" fn(*const OrtDataTransferImpl, *const OrtMemoryDevice,
            *const OrtMemoryDevice) -> bool>,
        CopyTensors: Option<unsafe extern "system" fn(*mut OrtDataTransferImpl, *const *const OrtValue,
            *mut *mut OrtValue, *mut *mut OrtSyncStream, usize) -> OrtStatusPtr>,
    } 3
}

callbacks! {
    /// A device's queue of work.
    OrtSyncStreamImpl {
        Release: Option<unsafe extern "system" fn(*mut OrtSyncStreamImpl)>,
        GetHandle: Option<unsafe extern "system" fn(*mut OrtSyncStreamImpl) -> *mut c_void>,
        CreateNotification: Option<unsafe extern "system" fn(*mut OrtSyncStreamImpl,
            *mut *mut OrtSyncNotificationImpl) -> OrtStatusPtr>,
        Flush: Option<unsafe extern "system" fn(*mut OrtSyncStreamImpl) -> OrtStatusPtr>,
        OnSessionRunEnd: Option<unsafe extern "system" fn(*mut OrtSyncStreamImpl) -> OrtStatusPtr>,
    } 5
}

callbacks! {
    /// A point in a stream that others can wait for.
    OrtSyncNotificationImpl {
        Release: Option<unsafe extern "system" fn(*mut OrtSyncNotificationImpl)>,
        Activate: Option<unsafe extern "system" fn(*mut OrtSyncNotificationImpl) -> OrtStatusPtr>,
        WaitOnDevice: Option<unsafe extern "system" fn(*mut OrtSyncNotificationImpl, *mut OrtSyncStream)
            -> OrtStatusPtr>,
        WaitOnHost: Option<unsafe extern "system" fn(*mut OrtSyncNotificationImpl) -> OrtStatusPtr>,
    } 4
}

/// A kernel of an EP's registry, made for one node.
#[repr(C)]
#[derive(Default, Clone, Copy)]
pub struct OrtKernelImpl {
    pub ort_version_supported: u32,
    /// ORT's own; 0 at first.
    pub flags: u32,
    pub Compute: Option<unsafe extern "system" fn(*mut OrtKernelImpl, *mut OrtKernelContext) -> OrtStatusPtr>,
    pub Release: Option<unsafe extern "system" fn(*mut OrtKernelImpl)>,
    pub PrePackWeight: Unused,
    pub SetSharedPrePackedWeight: Unused,
}
const _: () = {
    assert!(std::mem::offset_of!(OrtKernelImpl, flags) == 4);
    assert!(std::mem::offset_of!(OrtKernelImpl, Compute) == 8);
    assert!(size_of::<OrtKernelImpl>() == 40);
};

/// Makes a kernel for a node; the first argument is the state given to `KernelRegistry_AddKernel`.
pub type OrtKernelCreateFunc =
    unsafe extern "system" fn(*mut c_void, *const OrtKernelInfo, *mut *mut OrtKernelImpl) -> OrtStatusPtr;

/// How a claimed group is fused.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OrtNodeFusionOptions {
    pub ort_version_supported: u32,
    pub drop_constant_initializers: bool,
}
const _: () = {
    assert!(std::mem::offset_of!(OrtNodeFusionOptions, drop_constant_initializers) == 4);
    assert!(size_of::<OrtNodeFusionOptions>() == 8);
};

/// Functions for EPs, as far as this library calls them.
#[repr(C)]
pub struct OrtEpApi {
    pub CreateEpDevice: unsafe extern "system" fn(
        *mut OrtEpFactory,
        *const OrtHardwareDevice,
        *const OrtKeyValuePairs,
        *const OrtKeyValuePairs,
        *mut *mut OrtEpDevice,
    ) -> OrtStatusPtr,
    pub ReleaseEpDevice: unsafe extern "system" fn(*mut OrtEpDevice),
    pub EpGraphSupportInfo_AddNodesToFuse: unsafe extern "system" fn(
        *mut OrtEpGraphSupportInfo,
        *const *const OrtNode,
        usize,
        *const OrtNodeFusionOptions,
    ) -> OrtStatusPtr,
    pub EpGraphSupportInfo_AddSingleNode:
        unsafe extern "system" fn(*mut OrtEpGraphSupportInfo, *const OrtNode) -> OrtStatusPtr,
    pub NodeComputeContext_NodeName: unsafe extern "system" fn(*const OrtNodeComputeContext) -> *const c_char,
    pub EpDevice_AddAllocatorInfo: unsafe extern "system" fn(*mut OrtEpDevice, *const OrtMemoryInfo) -> OrtStatusPtr,
    pub MemoryInfo_GetMemoryDevice: unsafe extern "system" fn(*const OrtMemoryInfo) -> *const OrtMemoryDevice,
    pub Value_GetMemoryDevice: unsafe extern "system" fn(*const OrtValue) -> *const OrtMemoryDevice,
    pub MemoryDevice_AreEqual: unsafe extern "system" fn(*const OrtMemoryDevice, *const OrtMemoryDevice) -> bool,
    /// An `OrtMemoryInfoDeviceType`, which newer runtimes may extend.
    pub MemoryDevice_GetDeviceType: unsafe extern "system" fn(*const OrtMemoryDevice) -> c_int,
    /// An `OrtDeviceMemoryType`, which newer runtimes may extend.
    pub MemoryDevice_GetMemoryType: unsafe extern "system" fn(*const OrtMemoryDevice) -> c_int,
    pub MemoryDevice_GetVendorId: unsafe extern "system" fn(*const OrtMemoryDevice) -> u32,
    pub MemoryDevice_GetDeviceId: unsafe extern "system" fn(*const OrtMemoryDevice) -> u32,
    pub SyncStream_GetImpl: unsafe extern "system" fn(*const OrtSyncStream) -> *const OrtSyncStreamImpl,
    pub SyncStream_GetSyncId: Unused,
    pub GetSyncIdForLastWaitOnSyncStream: Unused,
    pub CreateHardwareDevice: Unused,
    pub ReleaseHardwareDevice: Unused,
    pub CreateKernelRegistry: unsafe extern "system" fn(*mut *mut OrtKernelRegistry) -> OrtStatusPtr,
    pub ReleaseKernelRegistry: unsafe extern "system" fn(*mut OrtKernelRegistry),
    pub KernelRegistry_AddKernel: unsafe extern "system" fn(
        *mut OrtKernelRegistry,
        *const OrtKernelDef,
        OrtKernelCreateFunc,
        *mut c_void,
    ) -> OrtStatusPtr,
    pub CreateKernelDefBuilder: unsafe extern "system" fn(*mut *mut OrtKernelDefBuilder) -> OrtStatusPtr,
    pub ReleaseKernelDefBuilder: unsafe extern "system" fn(*mut OrtKernelDefBuilder),
    pub KernelDefBuilder_SetOperatorType:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, *const c_char) -> OrtStatusPtr,
    pub KernelDefBuilder_SetDomain: unsafe extern "system" fn(*mut OrtKernelDefBuilder, *const c_char) -> OrtStatusPtr,
    /// Both ends are included.
    pub KernelDefBuilder_SetSinceVersion:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, c_int, c_int) -> OrtStatusPtr,
    pub KernelDefBuilder_SetExecutionProvider:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, *const c_char) -> OrtStatusPtr,
    pub KernelDefBuilder_SetInputMemType:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, usize, OrtMemType) -> OrtStatusPtr,
    pub KernelDefBuilder_SetOutputMemType:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, usize, OrtMemType) -> OrtStatusPtr,
    pub KernelDefBuilder_AddTypeConstraint: unsafe extern "system" fn(
        *mut OrtKernelDefBuilder,
        *const c_char,
        *const *const OrtDataType,
        usize,
    ) -> OrtStatusPtr,
    pub KernelDefBuilder_AddInputOutputAliases: Unused,
    pub KernelDefBuilder_AddInputOutputMutableAliases: Unused,
    pub KernelDefBuilder_Build:
        unsafe extern "system" fn(*mut OrtKernelDefBuilder, *mut *mut OrtKernelDef) -> OrtStatusPtr,
    pub ReleaseKernelDef: unsafe extern "system" fn(*mut OrtKernelDef),
    pub KernelDef_GetOperatorType: Unused,
    pub KernelDef_GetDomain: Unused,
    pub KernelDef_GetSinceVersion: Unused,
    pub KernelDef_GetExecutionProvider: Unused,
    pub KernelDef_GetInputMemType: Unused,
    pub KernelDef_GetOutputMemType: Unused,
    /// Takes an `ONNXTensorElementDataType`, which newer runtimes may extend.
    pub GetTensorDataType: unsafe extern "system" fn(c_int, *mut *const OrtDataType) -> OrtStatusPtr,
}

/// `OrtEpApi`'s slots by number, as seen by running against 1.24 to 1.32.
macro_rules! slots {
    ($($field:ident = $slot:literal),* $(,)?) => {
        const _: () = {
            $(assert!(std::mem::offset_of!(OrtEpApi, $field) == $slot * size_of::<usize>());)*
        };
    };
}
slots!(
    CreateEpDevice = 0,
    EpGraphSupportInfo_AddNodesToFuse = 2,
    EpDevice_AddAllocatorInfo = 5,
    MemoryInfo_GetMemoryDevice = 6,
    Value_GetMemoryDevice = 7,
    MemoryDevice_GetDeviceId = 12,
    SyncStream_GetImpl = 13,
    CreateHardwareDevice = 16,
    CreateKernelRegistry = 18,
    KernelRegistry_AddKernel = 20,
    CreateKernelDefBuilder = 21,
    KernelDefBuilder_SetInputMemType = 27,
    KernelDefBuilder_SetOutputMemType = 28,
    KernelDefBuilder_AddTypeConstraint = 29,
    KernelDefBuilder_Build = 32,
    GetTensorDataType = 40,
);
const _: () = assert!(size_of::<usize>() == 8, "shapes are passed as usize and as int64 alike");
