//! The C ABI against a mock host: versions, statuses, panics, order of release, and graphs that lie.

mod mock;

use abi::ort::sys::{OrtEp, OrtEpFactory, OrtStatusPtr};
use abi::ort::{
    Compiled, Device, DeviceKind, Ep, Factory, HardwareDevice, Logger, Registration, SessionOptions, create_factories,
    release_factory,
};
use abi::{Dim, Error, Graph, InitializerData, NodeId, Result};
use mock::{FUSED, Hardware, Host, LIVE, MockGraph, MockNode, MockType, MockValue, SessionEntries, lock, result};
use std::ffi::{CStr, CString};
use std::ptr::null;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

static DROPPED: AtomicUsize = AtomicUsize::new(0);
/// The last graph that a claim saw.
static SEEN: Mutex<Option<Graph>> = Mutex::new(None);

/// Behaves as the registered name says.
struct TestFactory(Registration);

fn make(registration: &Registration) -> Result<Box<dyn Factory>> {
    match registration.registered_name.as_str() {
        "error" => Err(Error::Internal("no factory".into())),
        "panic" => panic!("no factory\0at all"),
        _ => Ok(Box::new(TestFactory(registration.clone()))),
    }
}

impl Factory for TestFactory {
    fn name(&self) -> &str {
        &self.0.registered_name
    }

    fn vendor(&self) -> &str {
        "tests"
    }

    fn version(&self) -> &str {
        "1.2.3"
    }

    fn devices(&self, hardware: &[HardwareDevice]) -> Result<Vec<Device>> {
        let kinds: Vec<_> = hardware.iter().map(|device| device.kind).collect();
        match self.name() {
            "many" => Ok(vec![Device::default(); 9]),
            "nowhere" => Ok(vec![Device::default(), Device { hardware: 5, ..Device::default() }]),
            "devices panic" => panic!("in devices"),
            _ => Ok(kinds
                .iter()
                .position(|&k| k == DeviceKind::Cpu)
                .map_or(vec![], |hardware| vec![Device { hardware, ..Device::default() }])),
        }
    }

    fn create_ep(&self, session: &SessionOptions, _logger: Logger) -> Result<Box<dyn Ep>> {
        match session.provider(self.name()).next() {
            Some((name, value)) => Err(Error::Option { name: name.into(), got: value.into(), expected: "none".into() }),
            None => Ok(Box::new(TestEp)),
        }
    }
}

struct TestEp;

impl Drop for TestEp {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::SeqCst);
    }
}

impl Ep for TestEp {
    fn claim(&self, graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        *lock(&SEEN) = Some(graph.clone());
        Ok(match graph.nodes.first() {
            Some(node) if node.name == "panic" => panic!("in claim"),
            Some(node) if node.name == "nonsense" => vec![vec![0, 99]],
            _ => vec![vec![], (0..graph.nodes.len()).collect()],
        })
    }

    fn compile(&self, graph: Graph, _name: &str) -> Result<Box<dyn Compiled>> {
        *lock(&SEEN) = Some(graph);
        Err(Error::Internal("compile was reached".into()))
    }

    fn concurrent(&self) -> bool {
        panic!("in concurrent")
    }
}

/// A registered factory.
struct Registered {
    host: Host,
    factory: *mut OrtEpFactory,
}

fn register(version: &str, name: &str) -> Result<Registered, (i32, String)> {
    let host = Host::new(version);
    let name = CString::new(name).expect("no NUL");
    let (mut factories, mut count) = ([std::ptr::null_mut(); 4], 0);
    let base = &raw const *host.base;
    // SAFETY: what ORT would pass; a null logger is allowed.
    let status =
        unsafe { create_factories(name.as_ptr(), base, null(), factories.as_mut_ptr(), 4, &raw mut count, make) };
    match result(status) {
        Some(error) => Err(error),
        None => {
            assert_eq!(count, usize::from(!factories[0].is_null()));
            Ok(Registered { host, factory: factories[0] })
        }
    }
}

impl Registered {
    fn create_ep(&self, entries: &[(&'static str, &'static str)]) -> (OrtStatusPtr, *mut OrtEp) {
        let session = SessionEntries(entries.into());
        let mut ep = std::ptr::null_mut();
        // SAFETY: the session stands for ORT's; there are no devices.
        let status = unsafe {
            let create = (*self.factory).CreateEp.expect("is set");
            create(self.factory, null(), null(), 0, (&raw const session).cast(), null(), &raw mut ep)
        };
        (status, ep)
    }

    fn devices(&self, kinds: &[i32], room: usize) -> (Option<(i32, String)>, usize) {
        let hardware: Vec<_> = kinds.iter().map(|&kind| Hardware(kind)).collect();
        let hardware: Vec<_> = hardware.iter().map(|device| (&raw const *device).cast()).collect();
        let (mut devices, mut count) = (vec![std::ptr::null_mut(); room], 99);
        // SAFETY: arrays of the sizes given.
        let status = unsafe {
            let get = (*self.factory).GetSupportedDevices.expect("is set");
            get(self.factory, hardware.as_ptr(), hardware.len(), devices.as_mut_ptr(), room, &raw mut count)
        };
        // SAFETY: ORT owns, and here releases, the devices that it was told of.
        devices[..count].iter().for_each(|&device| unsafe { mock::take(device.cast::<u32>()) });
        (result(status), count)
    }

    /// What Compile says of the graph after GetCapability has seen it, and how many nodes were claimed.
    fn claim_and_compile(&self, graph: &MockGraph) -> (String, Vec<usize>) {
        let (status, ep) = self.create_ep(&[]);
        assert_eq!(result(status), None);
        let graph = (&raw const *graph).cast();
        let node = MockNode::new("fused", &[], &[]);
        let node = (&raw const *node).cast();
        let mut info = std::ptr::null_mut();
        lock(&FUSED).clear();
        // SAFETY: what ORT would pass.
        unsafe {
            let capability = (*ep).GetCapability.expect("is set");
            assert_eq!(result(capability(ep, graph, std::ptr::null_mut())), None);
            let compile = (*ep).Compile.expect("is set");
            let status = compile(ep, &raw const graph, &raw const node, 1, &raw mut info, std::ptr::null_mut());
            (*self.factory).ReleaseEp.expect("is set")(self.factory, ep);
            (result(status).expect("this EP compiles nothing").1, lock(&FUSED).clone())
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: made by `create_factories`.
        assert_eq!(result(unsafe { release_factory(self.factory) }), None);
        if !std::thread::panicking() {
            assert_eq!(LIVE.load(Ordering::SeqCst), 0, "objects of the host were leaked");
        }
        let _ = &self.host;
    }
}

/// Panics of the code under test are wanted; their traces are not.
fn quietly<T>(body: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = body();
    std::panic::set_hook(hook);
    result
}

#[test]
fn every_version_is_asked_for_what_it_has() {
    for (version, asked) in [("1.24.0", 24), ("1.31.1", 31), ("1.32.0", 31), ("1.40.2", 31)] {
        let registered = register(version, "name").expect("these versions will do");
        assert_eq!(mock::ASKED.load(Ordering::SeqCst), asked, "{version}");
        drop(registered);
    }
}

#[test]
fn older_versions_are_refused_by_name() {
    for version in ["1.23.2", "1.8.0"] {
        let (code, text) = register(version, "name").err().expect("too old");
        assert_eq!(code, 1);
        assert!(text.contains(&format!("ONNX Runtime {version} is not supported, 1.24 or newer")), "{text}");
    }
    // No API table at all: no status can be made, and no factory appears.
    for version in ["2.0.0", "nonsense", ""] {
        let host = Host::new(version);
        let mut count = 7;
        let base = &raw const *host.base;
        // SAFETY: what ORT would pass.
        let status =
            unsafe { create_factories(c"name".as_ptr(), base, null(), std::ptr::null_mut(), 4, &raw mut count, make) };
        assert_eq!((result(status), count), (None, 0), "{version}");
    }
}

#[test]
fn factories_that_fail_say_why() {
    quietly(|| {
        let (code, text) = register("1.32.0", "error").err().expect("fails");
        assert_eq!((code, text.as_str()), (1, "internal error, please report: no factory"));
        let (code, text) = register("1.32.0", "panic").err().expect("fails");
        assert_eq!(code, 1);
        assert!(text.ends_with("panic in CreateEpFactories: no factory\u{fffd}at all"), "{text}");
    });
}

#[test]
fn a_factory_without_memory_offers_none() {
    let registered = register("1.32.0", "MyExecutionProvider").expect("registers");
    let factory = registered.factory;
    let mut transfer = std::ptr::dangling_mut();
    // SAFETY: callbacks as ORT calls them.
    unsafe {
        let name = (*factory).GetName.expect("is set")(factory);
        assert_eq!(CStr::from_ptr(name), c"MyExecutionProvider");
        assert_eq!(CStr::from_ptr((*factory).GetVersion.expect("is set")(factory)), c"1.2.3");
        assert!(!(*factory).IsStreamAware.expect("is set")(factory));
        assert_eq!(result((*factory).CreateDataTransfer.expect("is set")(factory, &raw mut transfer)), None);
        assert!(transfer.is_null());
        let mut allocator = std::ptr::null_mut();
        let create = (*factory).CreateAllocator.expect("is set");
        let (code, text) = result(create(factory, null(), null(), &raw mut allocator)).expect("has no memory");
        assert!(code == 1 && text.contains("without memory"), "{text}");
    }
    assert_eq!(Registration { registered_name: "x".into(), ort_minor: 32, logger: None }.ep_name("Default"), "Default");
}

#[test]
fn devices_are_found_or_refused_and_never_leaked() {
    let registered = register("1.32.0", "plain").expect("registers");
    assert_eq!(registered.devices(&[1, 77, 0], 8), (None, 1));
    assert_eq!(registered.devices(&[], 8), (None, 0));
    drop(registered);
    for (name, wanted) in [
        ("many", "9 devices, where ORT has room for 8"),
        ("nowhere", "a device on hardware 5 of 1"),
        ("devices panic", "panic in GetSupportedDevices: in devices"),
    ] {
        let registered = register("1.32.0", name).expect("registers");
        let (error, _) = quietly(|| registered.devices(&[0], 8));
        let (code, text) = error.expect("must fail");
        assert!(code == 1 && text.ends_with(wanted), "{text}");
    }
}

#[test]
fn eps_may_outlive_their_factory() {
    let registered = register("1.32.0", "name").expect("registers");
    let (status, ep) = registered.create_ep(&[("ep.other.x", "1")]);
    assert_eq!(result(status), None);
    let factory = registered.factory;
    drop(registered);
    let again = register("1.32.0", "name").expect("registers");
    let before = DROPPED.load(Ordering::SeqCst);
    // SAFETY: ORT's order when a session outlives its registration.
    unsafe {
        assert_eq!(CStr::from_ptr((*ep).GetName.expect("is set")(ep)), c"name");
        let mut concurrent = true;
        let status = quietly(|| (*ep).IsConcurrentRunSupported.expect("is set")(ep, &raw mut concurrent));
        assert!(result(status).is_none() && !concurrent, "a panic there is never an error");
        (*factory).ReleaseEp.expect("is set")(factory, ep);
    }
    assert_eq!(DROPPED.load(Ordering::SeqCst), before + 1);
    drop(again);
}

#[test]
fn a_bad_option_fails_at_once_or_at_compile() {
    let registered = register("1.32.0", "name").expect("registers");
    let (status, ep) = registered.create_ep(&[("ep.name.x", "1")]);
    let (code, text) = result(status).expect("an unknown option");
    assert_eq!((code, text.as_str(), ep.is_null()), (2, "provider option 'x': got '1', expected none", true));
    drop(registered);
    // Older runtimes, asked from Python, would answer an error with a session on the CPU.
    let registered = register("1.30.0", "name").expect("registers");
    let (status, ep) = registered.create_ep(&[("ep.name.x", "1")]);
    assert!(result(status).is_none() && !ep.is_null());
    let node = MockNode::new("n", &[], &[]);
    let graph = MockGraph { nodes: vec![&raw const *node], ..MockGraph::default() };
    let (graph, fused) = ((&raw const graph).cast(), (&raw const *node).cast());
    let mut info = std::ptr::null_mut();
    // SAFETY: what ORT would pass.
    unsafe {
        let capability = (*ep).GetCapability.expect("is set");
        assert_eq!(result(capability(ep, graph, std::ptr::null_mut())), None);
        let compile = (*ep).Compile.expect("is set");
        let status = compile(ep, &raw const graph, &raw const fused, 1, &raw mut info, std::ptr::null_mut());
        let (code, text) = result(status).expect("the option's error");
        assert_eq!((code, text.as_str()), (2, "provider option 'x': got '1', expected none"));
        (*registered.factory).ReleaseEp.expect("is set")(registered.factory, ep);
    }
    assert_eq!(*lock(&FUSED), [1]);
}

fn float(dims: &[i64]) -> Option<MockType> {
    Some(MockType::new(1, Some(dims)))
}

/// Claims the graph of these nodes and constants; what Compile then says, and what was claimed.
fn try_graph(nodes: &[&MockNode], initializers: &[&MockValue]) -> (String, Vec<usize>) {
    let registered = register("1.32.0", "name").expect("registers");
    let graph = MockGraph {
        nodes: nodes.iter().map(|node| &raw const **node).collect(),
        initializers: initializers.iter().map(|value| &raw const **value).collect(),
        ..MockGraph::default()
    };
    quietly(|| registered.claim_and_compile(&graph))
}

#[test]
fn nodes_come_in_topological_order() {
    let [a, b, c] = ["a", "b", "c"].map(|name| MockValue::new(name, float(&[-1, -7, 3])));
    let last = MockNode::new("last", &[&raw const *b, null()], &[&raw const *c]);
    let first = MockNode::new("first", &[&raw const *a], &[&raw const *b]);
    let (text, fused) = try_graph(&[&last, &first], &[]);
    assert!(text.ends_with("compile was reached") && fused == [2], "{text}");
    let graph = lock(&SEEN).take().expect("was seen");
    let names: Vec<_> = graph.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["first", "last"]);
    assert_eq!((graph.nodes[1].inputs.len(), graph.nodes[1].inputs[1]), (2, None));
    assert_eq!((graph.nodes[0].domain.as_str(), graph.nodes[0].since_version), ("", 0));
    let shape = graph.values[0].shape.as_deref();
    assert_eq!(shape, Some(&[Dim::Unknown, Dim::Symbol("seven".into()), Dim::Known(3)][..]));
}

#[test]
fn graphs_that_contradict_themselves_are_errors() {
    let [a, b] = ["a", "b"].map(|name| MockValue::new(name, None));
    let forth = MockNode::new("forth", &[&raw const *a], &[&raw const *b]);
    let back = MockNode::new("back", &[&raw const *b], &[&raw const *a]);
    let twice = MockNode::new("twice", &[], &[&raw const *b]);
    let own = MockNode::new("own", &[&raw const *a], &[&raw const *a]);
    for (nodes, wanted) in [
        (vec![&*forth, &*back], "graph: its nodes form a cycle"),
        (vec![&*own], "graph: its nodes form a cycle"),
        (vec![&*forth, &*twice], "value 'b': has two producers"),
    ] {
        let (text, fused) = try_graph(&nodes, &[]);
        assert!(text.ends_with(wanted) && fused == [1], "{text}");
    }
    for (name, wanted) in
        [("panic", "panic in GetCapability: in claim"), ("nonsense", "a claim names a node that is not there")]
    {
        let (text, fused) = try_graph(&[&MockNode::new(name, &[], &[])], &[]);
        assert!(text.ends_with(wanted) && fused == [1], "{text}");
    }
}

#[test]
fn endless_nesting_is_an_error() {
    let mut node = MockNode::new("loop", &[], &[]);
    let mut graph = Box::new(MockGraph::default());
    node.body = &raw const *graph;
    graph.nodes.push(&raw const *node);
    let (text, _) = try_graph(&[&node], &[]);
    assert!(text.ends_with("control flow is nested deeper than 32 levels"), "{text}");
}

#[test]
fn constants_that_lie_are_errors() {
    let node = MockNode::new("n", &[], &[]);
    let lie = |declared: MockType, actual: MockType, bytes: usize| {
        let mut value = MockValue::new("w", Some(declared));
        value.constant = Some((actual, vec![0; bytes]));
        value
    };
    let of = |code, dims: &[i64]| MockType::new(code, Some(dims));
    let huge = i64::MAX / 2;
    for (value, wanted) in [
        (lie(of(1, &[2]), of(1, &[3]), 12), "is float[3], but declared as float[2]"),
        (lie(of(1, &[2]), of(6, &[2]), 8), "is int32[2], but declared as float[2]"),
        (lie(of(1, &[2]), of(1, &[2]), 7), "a float[2] tensor takes 7 bytes"),
        (lie(of(1, &[2]), of(1, &[-2]), 8), "a tensor has the impossible shape [-2]"),
        (lie(of(1, &[2]), of(77, &[2]), 8), "a tensor has the unknown element type 77"),
        (lie(of(1, &[-1]), of(1, &[2]), 8), "initializer 'w': has the shape [Unknown]"),
        (lie(of(1, &[huge, huge]), of(1, &[2]), 8), &format!("initializer 'w': has the shape [{huge}, {huge}]")),
        (lie(of(77, &[2]), of(1, &[2]), 8), "initializer 'w': is no tensor of a known type and shape"),
        (lie(MockType::new(1, None), of(1, &[2]), 8), "initializer 'w': is no tensor of a known type and shape"),
    ] {
        let (text, fused) = try_graph(&[&node], &[&value]);
        assert!(text.ends_with(wanted) && fused == [1], "{text}\nwanted: {wanted}");
    }
}

#[test]
fn external_constants_must_fit_their_shape() {
    let node = MockNode::new("n", &[], &[]);
    for (offset, size, wanted) in [
        (0, 7, "takes 7 bytes in its file, 8 by its shape [2] of float"),
        (-5, 8, "has the file offset -5"),
        (16, 8, "compile was reached"),
    ] {
        let mut value = MockValue::constant("w", MockType::new(1, Some(&[2])), &[0; 8]);
        value.file = Some((c"dir/w.bin".to_owned(), offset, size));
        let (text, _) = try_graph(&[&node], &[&value]);
        assert!(text.ends_with(wanted), "{text}");
    }
    let graph = lock(&SEEN).take().expect("was seen");
    let constant = graph.values[0].initializer.as_ref().expect("is one");
    let InitializerData::External { path, offset, len } = &constant.data else {
        panic!("{constant:?} is not external");
    };
    assert_eq!((path.to_str(), *offset, *len), (Some("dir/w.bin"), 16, 8));
}

#[test]
fn large_constants_are_left_unread_in_a_claim() {
    let node = MockNode::new("panic", &[], &[]);
    for (elements, read) in [(16 << 10, true), ((16 << 10) + 1, false)] {
        let bytes = vec![1; elements * 4];
        let type_ = MockType::new(1, Some(&[elements as i64]));
        try_graph(&[&node], &[&MockValue::constant("w", type_, &bytes)]);
        let graph = lock(&SEEN).take().expect("was seen");
        let data = &graph.values[0].initializer.as_ref().expect("is one").data;
        assert_eq!(matches!(data, InitializerData::Inline(_)), read, "{elements}");
    }
}
