//! Products that share their input, with the norm that makes it and the gated activation that takes them: one GEMV.
//! [`row`] has the kernel for one row, this file that for a few.
//!
//! K: columns of the input, M: its rows, N: columns of an output.

use super::DOMAIN;
use super::cluster::{Built, ClusterKernel, Member, Occurrence, Pattern, Search};
use crate::cuda::{ConstantProduct, DevPtr, Field, LaunchCx, lean_shape, staged_rows, suffix};
use crate::kernel_params;
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::cuda::Function;
use abi::{DType, NodeId, Result};

mod row;

/// See the module.
pub const PATTERN: Pattern = Pattern { find, build };

/// Products of one GEMV (`kSegments`).
const MOST: usize = 8;
/// Rows that the GEMV takes.
const ROWS: usize = 16;
/// Rows of one of its blocks (`kGemvRows`).
const STEP: usize = 8;

/// Warps of one of its blocks that a multiprocessor holds, by registers.
const HELD: usize = 24;

const MS: &str = "com.microsoft";

fn find(search: &Search<'_>, id: NodeId) -> Option<Vec<NodeId>> {
    let x = search.input(id, 0)?;
    let mut products: Vec<_> = search.readers(x).iter().copied().filter(|&n| is_product(search, n, x)).collect();
    products.dedup();
    if products.first() != Some(&id) || products.len() > MOST {
        return None;
    }
    let inner = |&norm: &NodeId| {
        let sum = skips(search, norm).then_some(3);
        is_norm(search, norm) && search.output(norm, 0) == Some(x) && search.is_inner(norm, sum, &products)
    };
    let norm = search.producer(x).filter(inner);
    let mut nodes: Vec<_> = norm.into_iter().collect();
    nodes.extend(&products);
    if let [a, b] = products[..]
        && let Some(gate) = gated(search, a, b)
    {
        // The activation's own input first.
        if search.input(gate, 0) != search.output(a, 0) {
            let at = nodes.len() - 2;
            nodes.swap(at, at + 1);
        }
        nodes.push(gate);
    }
    // One product alone is a cluster for the sake of the kernel for one row.
    (nodes.len() > 1 || search.is(id, MS, "MatMulNBits")).then_some(nodes)
}

/// Whether `id` multiplies `x` by constants. Types and layouts are the kernels' to say.
fn is_product(search: &Search<'_>, id: NodeId, x: usize) -> bool {
    let node = &search.graph.nodes[id];
    let known = matches!((node.domain.as_str(), node.op_type.as_str()), (MS, "MatMulNBits") | ("", "MatMul" | "Gemm"));
    let mut rest = node.inputs.iter().skip(1).flatten();
    known && node.inputs.first() == Some(&Some(x)) && rest.all(|&v| search.is_constant(v))
}

/// Whether `id` normalises rows by their root mean square, over the last axis.
fn is_norm(search: &Search<'_>, id: NodeId) -> bool {
    let node = search.node(id);
    let whole = |axis: i64| axis == -1 || node.input(0).and_then(|x| x.rank()).is_some_and(|r| axis == r as i64 - 1);
    match (node.node().domain.as_str(), node.node().op_type.as_str()) {
        ("", "SimplifiedLayerNormalization" | "RMSNormalization") => whole(node.int("axis", -1)) && !node.has_output(1),
        (MS, "SkipSimplifiedLayerNormalization") => !node.has_input(3) && !node.has_output(1) && !node.has_output(2),
        _ => false,
    }
}

/// Whether the norm adds a second tensor first.
fn skips(search: &Search<'_>, id: NodeId) -> bool {
    search.is(id, MS, "SkipSimplifiedLayerNormalization")
}

/// The SiluMul of both products, if nobody else reads them.
fn gated(search: &Search<'_>, a: NodeId, b: NodeId) -> Option<NodeId> {
    let &[reader] = search.readers(search.output(a, 0)?) else { return None };
    let both = [search.input(reader, 0), search.input(reader, 1)];
    let fits = search.is(reader, DOMAIN, "SiluMul")
        && both.iter().all(Option::is_some)
        && (both == [search.output(a, 0), search.output(b, 0)] || both == [search.output(b, 0), search.output(a, 0)]);
    (fits && search.is_inner(a, None, &[reader]) && search.is_inner(b, None, &[reader])).then_some(reader)
}

kernel_params! {
    /// As in `gemv.cu`.
    struct GroupedParams {
        x: DevPtr,
        skip: DevPtr,
        gamma: DevPtr,
        sum: DevPtr,
        tiles: u32,
        count: u32,
        m: u32,
        k: u32,
        chunks: u32,
        norm: u32,
        gated: u32,
        epsilon: f32,
        /// Each product's first tile among those of all.
        first: [u32; MOST],
        segments: [Segment; MOST],
    }
}

/// One product, as in `segment.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Segment {
    data: DevPtr,
    scales: DevPtr,
    zeros: DevPtr,
    /// One value a column of the product, or null.
    bias: DevPtr,
    /// The output.
    y: DevPtr,
    n: u32,
    /// Whether the weights are 16-bit floats.
    halves: u32,
    tiles: u32,
    pad: [u32; 3],
}

// SAFETY: five addresses, then six 32-bit numbers: no padding.
unsafe impl Field for Segment {
    const POINTERS: &'static [u16] = &[0, 8, 16, 24, 32];
}

impl Segment {
    /// Without what a Run brings.
    fn of(product: &ConstantProduct) -> Self {
        let [data, scales, zeros] = product.weights.addresses();
        let (n, tiles) = (product.weights.n() as u32, product.weights.tiles() as u32);
        let halves = u32::from(product.layout.is_none());
        Self { data, scales, zeros, n, halves, tiles, ..Self::default() }
    }
}

/// The kernel of one occurrence.
struct Grouped {
    function: Function,
    products: Vec<ConstantProduct>,
    /// The norm's epsilon, if there is one.
    norm: Option<f32>,
    skips: bool,
    gated: bool,
    /// For one row.
    row: Option<row::Row>,
}

fn build(found: &Occurrence<'_>) -> Result<Built> {
    let products: Vec<_> = (0..found.members()).filter_map(|i| found.kernel(i)?.product()).collect();
    let first = found.node(0);
    let norm = first.node().op_type.ends_with("Normalization");
    let gated = found.node(found.members() - 1).node().domain == DOMAIN;
    if products.len() + usize::from(norm) + usize::from(gated) != found.members() {
        return Ok(None);
    }
    let Some(name) = kernel_name(&products) else { return Ok(None) };
    let skips = first.node().op_type == "SkipSimplifiedLayerNormalization";
    let epsilon = first.float("epsilon", if skips { 1e-12 } else { 1e-5 });
    let norm = norm.then_some(epsilon);
    let function = found.device.function("fuse_products_gemv", &name)?;
    let row = row::Row::new(found.device, &name, &products, norm, gated)?;
    Ok(Some(Box::new(Grouped { function, products, norm, skips, gated, row })))
}

/// The kernel that takes all of `products`; `None` when there is none.
fn kernel_name(products: &[ConstantProduct]) -> Option<String> {
    let (dtype, k) = (products[0].dtype, products[0].weights.k());
    let mut layouts = products.iter().filter_map(|p| p.layout);
    let layout: Option<Layout> = layouts.next();
    let like = |a: &Layout| {
        layout.is_some_and(|b| (a.bits, a.block, a.scale, a.zero_point) == (b.bits, b.block, b.scale, b.zero_point))
    };
    let same = layouts.all(|l| like(&l)) && products.iter().all(|p| p.dtype == dtype && p.weights.k() == k);
    // Whole groups of 128 columns.
    if !same || k == 0 || !k.is_multiple_of(128) || !matches!(dtype, DType::F16 | DType::BF16) {
        return None;
    }
    let suffix = suffix(dtype);
    let Some(layout) = layout else { return Some(format!("halves_{suffix}")) };
    let (bits, block) = (layout.bits, layout.block);
    let zeros = match layout.zero_point {
        ZeroPoint::Default => "plain",
        ZeroPoint::Bytes => "bytes",
        ZeroPoint::Float => return None,
    };
    (bits == 4 && (32..=128).contains(&block)).then(|| format!("lean_{block}_{zeros}_{suffix}"))
}

/// What a Run brings.
struct Operands {
    x: DevPtr,
    skip: DevPtr,
    gamma: DevPtr,
    /// The sum of `x` and `skip`.
    sum: DevPtr,
    rows: usize,
    /// Each product's output and bias.
    ends: [(DevPtr, DevPtr); MOST],
}

impl Grouped {
    /// `None` where the members shall run one by one.
    fn operands(&self, members: &[Member<'_>]) -> Option<Operands> {
        let nodes = &members[usize::from(self.norm.is_some())..];
        let x = members[0].input(0)?;
        let k = self.products[0].weights.k();
        let mut operands = Operands {
            x: x.ptr,
            skip: DevPtr::NULL,
            gamma: DevPtr::NULL,
            sum: DevPtr::NULL,
            rows: x.len() / k,
            ends: [(DevPtr::NULL, DevPtr::NULL); MOST],
        };
        if self.norm.is_some() {
            let gamma = members[0].input(if self.skips { 2 } else { 1 })?;
            operands.gamma = (gamma.dtype == x.dtype && gamma.len() == k).then_some(gamma.ptr)?;
            if self.skips {
                operands.skip = members[0].input(1).filter(|skip| skip.len() == x.len())?.ptr;
                operands.sum = members[0].output(3).map_or(DevPtr::NULL, |sum| sum.ptr);
            }
        }
        for ((product, member), end) in self.products.iter().zip(nodes).zip(&mut operands.ends) {
            let y = if self.gated { nodes[self.products.len()].output(0) } else { member.output(0) };
            if product.bias.is_none() && member.input(2).is_some() {
                return None;
            }
            let bias = product.bias.and_then(|slot| member.input(slot));
            *end = (y?.ptr, bias.map_or(DevPtr::NULL, |bias| bias.ptr));
        }
        let equal = !self.gated || self.products[0].weights.n() == self.products[1].weights.n();
        (equal && (1..=ROWS).contains(&operands.rows)).then_some(operands)
    }

    /// The kernel for a few rows.
    fn push_rows(&self, cx: &mut LaunchCx<'_>, operands: &Operands) -> Result<bool> {
        let weights = &self.products[0].weights;
        let mut params = GroupedParams {
            x: operands.x,
            skip: operands.skip,
            gamma: operands.gamma,
            sum: operands.sum,
            segments: [Segment::default(); MOST],
            tiles: 0,
            count: self.products.len() as u32,
            m: operands.rows as u32,
            k: weights.k() as u32,
            chunks: weights.chunks() as u32,
            norm: u32::from(self.norm.is_some()),
            gated: u32::from(self.gated),
            epsilon: self.norm.unwrap_or(0.0),
            first: [0; MOST],
        };
        for (i, (product, (y, bias))) in self.products.iter().zip(operands.ends).enumerate() {
            params.segments[i] = Segment { bias, y, ..Segment::of(product) };
            params.first[i] = params.tiles;
            params.tiles += params.segments[i].tiles;
        }
        let units = if self.gated { params.tiles / 2 } else { params.tiles } as usize;
        let (rows, chunks) = (operands.rows, params.chunks as usize);
        let shared = staged_rows(rows.min(STEP), chunks);
        let layers = [rows.div_ceil(STEP), 1];
        let Some(shape) = lean_shape(units, chunks / 2, layers, cx.device(), shared, HELD) else { return Ok(false) };
        cx.push(&self.function, shape, &params)?;
        Ok(true)
    }
}

impl ClusterKernel for Grouped {
    fn launch(&self, cx: &mut LaunchCx<'_>, members: &[Member<'_>]) -> Result<bool> {
        let Some(operands) = self.operands(members) else { return Ok(false) };
        let alone = members.len() == 1;
        let Some(row) = self.row.as_ref().filter(|_| operands.rows == 1) else {
            return if alone { Ok(false) } else { self.push_rows(cx, &operands) };
        };
        let mut params = row.params;
        (params.x, params.skip) = (operands.x, operands.skip);
        (params.gamma, params.sum) = (operands.gamma, operands.sum);
        params.hastens = u32::from(cx.hastens());
        for (segment, (y, bias)) in params.segments.iter_mut().zip(operands.ends) {
            (segment.y, segment.bias) = (y, bias);
        }
        cx.push(&row.function, row.shape, &params)?;
        Ok(true)
    }

    fn is_patient(&self) -> bool {
        true
    }
}
