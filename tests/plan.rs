//! Plans on a mock host: aliased buffers, changing shapes, shared workspaces.

use abi::tensor::AlignedBytes;
use abi::{Attr, DType, Dim, Graph, HostTensor, Initializer, InitializerData, Node, Result, Serial, Value, ValueId};
use kernels::plan::{Io, Plan};
use kernels::settings::Settings;
use kernels::weights::PackCache;
use proptest::prelude::*;

/// A graph under construction.
#[derive(Default)]
struct Builder(Graph);

impl Builder {
    fn value(&mut self, name: &str, dtype: Option<DType>, shape: Option<Vec<Dim>>) -> ValueId {
        self.0.values.push(Value { name: name.into(), dtype, shape, initializer: None });
        self.0.values.len() - 1
    }

    fn input(&mut self, name: &str, dtype: DType, rank: usize) -> ValueId {
        let id = self.value(name, Some(dtype), Some(vec![Dim::Unknown; rank]));
        self.0.inputs.push(id);
        id
    }

    fn constant(&mut self, name: &str, tensor: HostTensor) -> ValueId {
        let id = self.value(name, Some(tensor.dtype()), None);
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        self.0.values[id].initializer = Some(Initializer { dtype, shape, data: InitializerData::Inline(tensor) });
        id
    }

    fn node(&mut self, domain: &str, op: &str, since: u32, inputs: &[ValueId], attrs: &[(&str, Attr)]) -> ValueId {
        let out = self.value(&format!("{op}{}", self.0.nodes.len()), None, None);
        self.0.nodes.push(Node {
            name: format!("{op}{}", self.0.nodes.len()),
            domain: domain.into(),
            op_type: op.into(),
            since_version: since,
            inputs: inputs.iter().map(|&v| Some(v)).collect(),
            outputs: vec![Some(out)],
            attrs: attrs.iter().map(|(n, a)| (n.to_string(), a.clone())).collect(),
            implicit_inputs: Vec::new(),
            handle: 0,
        });
        out
    }

    fn norm(&mut self, x: ValueId, scale: ValueId) -> ValueId {
        self.node("", "SimplifiedLayerNormalization", 1, &[x, scale], &[("axis", Attr::Int(-1))])
    }

    fn plan(mut self, outputs: &[ValueId]) -> Plan {
        self.0.outputs = outputs.to_vec();
        Plan::build(self.0, &Settings::default(), &PackCache::default(), None).expect("the graph is sound")
    }
}

/// Buffers of one Run; an output may be an input's own buffer.
struct Host {
    inputs: Vec<(DType, Vec<usize>, *const u8)>,
    /// Buffers to write to; `None` asks for a new one.
    bound: Vec<Option<*mut u8>>,
    made: Vec<Option<(Vec<usize>, AlignedBytes)>>,
}

impl Host {
    fn new(inputs: &[&HostTensor], outputs: usize) -> Self {
        let inputs = inputs.iter().map(|t| (t.dtype(), t.shape().to_vec(), t.bytes().as_ptr())).collect();
        Self { inputs, bound: vec![None; outputs], made: (0..outputs).map(|_| None).collect() }
    }

    fn f32s(&self, j: usize) -> Vec<f32> {
        let (_, bytes) = self.made[j].as_ref().expect("the plan asked for it");
        bytes.as_slice().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

impl Io for Host {
    fn input(&self, i: usize) -> Result<(DType, &[usize], *const u8)> {
        let (dtype, shape, ptr) = &self.inputs[i];
        Ok((*dtype, shape, *ptr))
    }

    fn output(&mut self, j: usize, dtype: DType, shape: &[usize]) -> Result<*mut u8> {
        if let Some(ptr) = self.bound[j] {
            return Ok(ptr);
        }
        let mut bytes = AlignedBytes::zeroed(dtype.bytes(shape.iter().product()).expect("small"));
        bytes.as_mut_slice().fill(0xAB);
        let ptr = bytes.as_mut_slice().as_mut_ptr();
        self.made[j] = Some((shape.to_vec(), bytes));
        Ok(ptr)
    }
}

fn rms(x: &[f32]) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    x.iter().map(|&v| (f64::from(v) / (mean + 1e-5).sqrt()) as f32).collect()
}

fn close(got: &[f32], expected: &[f32]) {
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(got.len() == expected.len() && worst < 1e-5, "{got:?} is not {expected:?}");
}

#[test]
fn an_input_that_an_output_overwrites_is_read_first() {
    let mut b = Builder::default();
    let (x, scale) = (b.input("x", DType::F32, 2), b.constant("scale", HostTensor::new(&[4], &[1f32; 4])));
    let first = b.norm(x, scale);
    let second = b.node("", "Identity", 1, &[x], &[]);
    let third = b.norm(second, scale);
    let plan = b.plan(&[first, third]);
    let values = [1f32, 2.0, -3.0, 4.0];
    let mut buffer = values;
    let mut host = Host::new(&[], 2);
    host.inputs = vec![(DType::F32, vec![1, 4], buffer.as_ptr().cast())];
    host.bound[0] = Some(buffer.as_mut_ptr().cast());
    plan.run(&mut host, &Serial).expect("runs");
    close(&host.f32s(1), &rms(&values));
    close(&buffer, &rms(&values));
}

#[test]
fn outputs_that_are_inputs_or_views_are_copied() {
    let mut b = Builder::default();
    let x = b.input("x", DType::F32, 2);
    let (same, again) = (b.node("", "Identity", 1, &[x], &[]), b.node("", "Identity", 1, &[x], &[]));
    let plan = b.plan(&[same, again]);
    let x = HostTensor::new(&[2, 2], &[1f32, 2.0, 3.0, 4.0]);
    let mut host = Host::new(&[&x], 2);
    plan.run(&mut host, &Serial).expect("runs");
    assert_eq!(host.f32s(0), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(host.f32s(1), host.f32s(0));
}

#[test]
fn every_shape_gets_its_own_instance_and_empty_tensors_run() {
    let mut b = Builder::default();
    let (x, scale) = (b.input("x", DType::F32, 2), b.constant("scale", HostTensor::new(&[3], &[1f32; 3])));
    let (first, _) = (b.norm(x, scale), ());
    let second = b.norm(first, scale);
    let plan = b.plan(&[second]);
    for rows in [1usize, 5, 0, 2, 5, 40, 1] {
        let values: Vec<f32> = (0..rows * 3).map(|i| i as f32 - 2.5).collect();
        let x = HostTensor::new(&[rows, 3], &values);
        let mut host = Host::new(&[&x], 1);
        plan.run(&mut host, &Serial).expect("runs");
        let expected: Vec<f32> = values.chunks(3).flat_map(|row| rms(&rms(row))).collect();
        close(&host.f32s(0), &expected);
    }
}

#[test]
fn a_wrong_type_or_shape_is_a_named_error_and_the_plan_lives_on() {
    let mut b = Builder::default();
    let (x, scale) = (b.input("x", DType::F32, 2), b.constant("scale", HostTensor::new(&[3], &[1f32; 3])));
    let y = b.norm(x, scale);
    let plan = b.plan(&[y]);
    let wrong_shape = HostTensor::new(&[1, 4], &[0f32; 4]);
    let error = plan.run(&mut Host::new(&[&wrong_shape], 1), &Serial).expect_err("4 is not 3").to_string();
    assert!(error.contains("SimplifiedLayerNormalization0"), "{error}");
    let wrong_type = HostTensor::new(&[1, 3], &[0i32; 3]);
    let error = plan.run(&mut Host::new(&[&wrong_type], 1), &Serial).expect_err("int32 is not float").to_string();
    assert!(error.contains("'x'") && error.contains("int32"), "{error}");
    let right = HostTensor::new(&[1, 3], &[1f32, 2.0, 3.0]);
    let mut host = Host::new(&[&right], 1);
    plan.run(&mut host, &Serial).expect("runs");
    close(&host.f32s(0), &rms(&[1.0, 2.0, 3.0]));
}

/// y = norm(Reshape(Concat(a, norm(b)), [Size(b), -1])) of a [N, 4] and b [M, 4]: a shape that the host computes, tensors
/// that grow with N and M, and a view.
fn lengths_everywhere() -> Plan {
    let mut b = Builder::default();
    let (x, y) = (b.input("a", DType::F32, 2), b.input("b", DType::F32, 2));
    let scale = b.constant("scale", HostTensor::new(&[4], &[1f32; 4]));
    let normed = b.norm(y, scale);
    let both = b.node("", "Concat", 13, &[x, normed], &[("axis", Attr::Int(0))]);
    let (shape, minus) = (b.node("", "Shape", 15, &[both], &[]), b.constant("minus", HostTensor::new(&[1], &[-1i64])));
    let all = b.norm(both, scale);
    let one = b.constant("one", HostTensor::new(&[1], &[1i64]));
    let wide = b.node("", "Gather", 13, &[shape, one], &[("axis", Attr::Int(0))]);
    let target = b.node("", "Concat", 13, &[minus, wide], &[("axis", Attr::Int(0))]);
    let viewed = b.node("", "Reshape", 14, &[all, target], &[]);
    let out = b.norm(viewed, scale);
    b.plan(&[out, shape])
}

type Tensors = Vec<(Vec<usize>, Vec<u8>)>;

/// What `plan` makes of N rows and M rows.
fn outputs(plan: &Plan, rows: usize, more: usize) -> Tensors {
    let values = |n: usize| (0..n * 4).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>();
    let (a, b) = (HostTensor::new(&[rows, 4], &values(rows)), HostTensor::new(&[more, 4], &values(more)));
    let mut host = Host::new(&[&a, &b], 2);
    plan.run(&mut host, &Serial).expect("runs");
    host.made.iter().flatten().map(|(shape, bytes)| (shape.clone(), bytes.as_slice().to_vec())).collect()
}

proptest! {
    #[test]
    fn a_plan_that_has_seen_other_lengths_computes_the_same(
        lengths in proptest::collection::vec((0usize..3, 0usize..200, any::<bool>(), 0u8..8), 1..24),
    ) {
        let plan = lengths_everywhere();
        let (mut rows, mut more) = (1, 1);
        let mut before = (rows, more, outputs(&plan, rows, more));
        for (jump, far, first, kind) in lengths {
            // Mostly a token or two more, as in decoding.
            let length = if first { &mut rows } else { &mut more };
            *length = if kind == 7 { far } else { *length + jump };
            if kind == 6 {
                let (a, b) = (HostTensor::new(&[rows, 4], &vec![0f32; 4 * rows]), HostTensor::new(&[1, 3], &[0f32; 3]));
                prop_assert!(plan.run(&mut Host::new(&[&a, &b], 2), &Serial).is_err());
            }
            let got = outputs(&plan, rows, more);
            prop_assert_eq!(&got, &outputs(&lengths_everywhere(), rows, more));
            prop_assert_eq!(&got[0].0, &[rows + more, 4]);
            prop_assert_eq!(&outputs(&plan, before.0, before.1), &before.2);
            before = (rows, more, got);
        }
    }
}

#[test]
fn silu_fusion_agrees_with_its_definition() {
    let x = HostTensor::new(&[1, 6], &[-20f32, -1.0, 0.0, 0.5, 3.0, 30.0]);
    let gate = HostTensor::new(&[1, 6], &[2f32, -1.0, 5.0, 0.25, 1.0, -3.0]);
    let mut b = Builder::default();
    let (a, g) = (b.input("a", DType::F32, 2), b.input("g", DType::F32, 2));
    let y = b.node("nxrt.fused", "SiluMul", 1, &[a, g], &[]);
    let plan = b.plan(&[y]);
    let mut host = Host::new(&[&x, &gate], 1);
    plan.run(&mut host, &Serial).expect("runs");
    let of = |t: &HostTensor| t.as_slice::<f32>().expect("f32").to_vec();
    let silu = |v: f32| f64::from(v) / (1.0 + (-f64::from(v)).exp());
    let expected: Vec<f32> = of(&x).iter().zip(of(&gate)).map(|(&v, g)| (silu(v) * f64::from(g)) as f32).collect();
    close(&host.f32s(0), &expected);
}
