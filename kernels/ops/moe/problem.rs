//! What a node's attributes and shapes say: sizes, routing, activation, and how each projection is quantised.

use crate::op::NodeCx;
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::{DType, Dim, Result};

/// A node, its weights' shapes known and checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Problem {
    /// Type of the input, the biases and the output.
    pub dtype: DType,
    /// E.
    pub experts: usize,
    /// H.
    pub hidden: usize,
    /// I.
    pub inter: usize,
    pub routing: Routing,
    pub activation: Activation,
    pub gate: Gate,
    pub fc1: Matrix,
    pub fc2: Matrix,
    /// Present for [`Gate::Separate`] alone.
    pub fc3: Option<Matrix>,
    /// Whether activations may be quantised to int8 (accuracy level 4).
    pub int8: bool,
}

/// How tokens choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Routing {
    /// Experts a token.
    pub top: usize,
    /// Whether the chosen experts' weights sum to 1.
    pub normalize: bool,
    /// Whether the two experts are chosen, and weighed, by the sparse mixer.
    pub sparse_mixer: bool,
}

/// Where the factor of the activated values comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Gate {
    /// There is none.
    None,
    /// FC1's rows are g0, l0, g1, l1...
    Interleaved,
    /// FC1's rows are all of g, then all of l.
    Halves,
    /// g is FC1, l is FC3.
    Separate,
}

/// The function between the projections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Activation {
    pub kind: Kind,
    pub alpha: f32,
    pub beta: f32,
    /// Infinite where nothing is clamped.
    pub limit: f32,
    /// Whether the limit holds the activated gate, not the gate.
    pub limit_after: bool,
}

/// See the schema; the GELUs are the tanh form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Relu,
    Relu2,
    Gelu,
    Silu,
    Identity,
    Swiglu,
    Geglu,
}

/// One projection of every expert: [E, N, K].
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Matrix {
    pub slots: Slots,
    /// N, output features.
    pub n: usize,
    /// K, input features.
    pub k: usize,
    pub format: Format,
    pub stored: Stored,
}

/// A projection's input slots, whether or not the node has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slots {
    pub name: &'static str,
    pub weights: usize,
    pub bias: usize,
    pub scales: Option<usize>,
    pub zero_points: Option<usize>,
    pub global: Option<usize>,
}

/// What one expert's weights are once everything special about their storage is undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Format {
    /// [N, K] of that type.
    Dense(DType),
    /// As MatMulNBits has them.
    Int(Layout),
    /// E2M1 codes [N, K / 2], low half first, times a bfloat16 scale for each `block` of K.
    Fp4 { block: usize },
    /// E4M3FN [N, K], times a float scale for each square block; 0 for none.
    Fp8 { block: usize },
}

/// How the model stores what [`Format`] describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stored {
    /// In rows of K.
    Rows,
    /// In rows of K, `bits` wide, with a scale for each `block` (0: for the row); `zero_rows`: zero points are packed
    /// along N, not along K.
    Blocks { bits: usize, block: usize, zero_rows: bool },
    /// As [`Self::Blocks`], for the mixed GEMM of CUTLASS on sm_80.
    Cutlass { bits: usize, block: usize, zero_rows: bool },
    /// [K, N / 2]: the two halves of a byte are neighbours in N.
    Columns,
}

const QMOE: [Slots; 3] = [
    Slots { name: "fc1", weights: 2, scales: Some(3), bias: 4, zero_points: Some(11), global: Some(15) },
    Slots { name: "fc2", weights: 5, scales: Some(6), bias: 7, zero_points: Some(12), global: Some(16) },
    Slots { name: "fc3", weights: 8, scales: Some(9), bias: 10, zero_points: Some(13), global: None },
];
const MOE: [Slots; 3] = [
    Slots { name: "fc1", weights: 2, bias: 3, scales: None, zero_points: None, global: None },
    Slots { name: "fc2", weights: 4, bias: 5, scales: None, zero_points: None, global: None },
    Slots { name: "fc3", weights: 6, bias: 7, scales: None, zero_points: None, global: None },
];

/// Input slots that both ops have.
pub(super) const INPUT: usize = 0;
pub(super) const ROUTER: usize = 1;
/// QMoE's own.
pub(super) const ROUTER_WEIGHTS: usize = 14;

/// FC1's, FC2's and FC3's slots.
pub(super) fn slots(cx: &NodeCx) -> [Slots; 3] {
    if quantized(cx) { QMOE } else { MOE }
}

/// Whether the node is a QMoE.
pub(super) fn quantized(cx: &NodeCx) -> bool {
    cx.node().op_type == "QMoE"
}

/// How QMoE's weights are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quant {
    None,
    Int,
    Fp4,
    Nvfp4,
    Fp8,
}

impl Quant {
    fn of(cx: &NodeCx) -> Self {
        match cx.string("quant_type", "int") {
            _ if !quantized(cx) => Self::None,
            "fp4" => Self::Fp4,
            "nvfp4" => Self::Nvfp4,
            "fp8" => Self::Fp8,
            _ => Self::Int,
        }
    }
}

impl Kind {
    fn of(cx: &NodeCx) -> Self {
        match cx.string("activation_type", "relu") {
            "relu2" => Self::Relu2,
            "gelu" => Self::Gelu,
            "silu" => Self::Silu,
            "identity" => Self::Identity,
            "swiglu" => Self::Swiglu,
            "geglu" => Self::Geglu,
            _ => Self::Relu,
        }
    }
}

impl Gate {
    fn of(cx: &NodeCx) -> Self {
        let fc3 = cx.has_input(slots(cx)[2].weights);
        match (Kind::of(cx), cx.int("swiglu_fusion", 0)) {
            _ if fc3 => Self::Separate,
            (Kind::Swiglu | Kind::Geglu, 2) => Self::Halves,
            // Older exports leave out that FC1 is interleaved: without an FC3 it can be nothing else.
            (Kind::Swiglu | Kind::Geglu, _) => Self::Interleaved,
            _ => Self::None,
        }
    }

    /// FC1's rows a feature of I.
    pub fn rows(self) -> usize {
        if matches!(self, Self::Interleaved | Self::Halves) { 2 } else { 1 }
    }
}

impl Problem {
    /// Reads a node whose types and attributes the claim has checked.
    pub fn of(cx: &NodeCx) -> Result<Self> {
        let gate = Gate::of(cx);
        let [slots1, slots2, slots3] = slots(cx);
        let reader = Reader { cx, quant: Quant::of(cx), prepacked: cx.int("weights_prepacked", -1) };
        let (b1, b2, b3) = (reader.bits(slots1), reader.bits(slots2), reader.bits(slots3));
        let (sizes, special) = reader.sizes(gate, slots1, slots2, (b1, b2))?;
        let Sizes { experts, hidden, inter } = sizes;
        if gate == Gate::Separate {
            reader.check_separate(slots3, sizes, special, b3)?;
        }
        let top = cx.int("k", 1);
        if !(1..=experts as i64).contains(&top) {
            return Err(cx.error("attribute 'k'", top, format_args!("1 to the {experts} experts")));
        }
        let limit = cx.float("swiglu_limit", f32::INFINITY);
        let matrix = |slots, n, k, bits, special| reader.matrix(slots, (experts, n, k), bits, special);
        Ok(Self {
            dtype: cx.required(INPUT)?.dtype,
            experts,
            hidden,
            inter,
            routing: Routing {
                top: top as usize,
                normalize: cx.int("normalize_routing_weights", 0) != 0,
                sparse_mixer: cx.int("use_sparse_mixer", 0) != 0,
            },
            activation: Activation {
                kind: Kind::of(cx),
                alpha: cx.float("activation_alpha", 1.0),
                beta: cx.float("activation_beta", 0.0),
                limit: if limit > 0.0 { limit } else { f32::INFINITY },
                limit_after: cx.int("swiglu_limit_after_activation", 0) != 0,
            },
            gate,
            fc1: matrix(slots1, gate.rows() * inter, hidden, b1, special)?,
            fc2: matrix(slots2, hidden, inter, b2, special)?,
            fc3: match gate {
                Gate::Separate => Some(matrix(slots3, inter, hidden, b3, false)?),
                _ => None,
            },
            int8: cx.int("accuracy_level", 0) == 4,
        })
    }

    /// The projections that the node has.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()].into_iter().flatten()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    experts: usize,
    hidden: usize,
    inter: usize,
}

struct Reader<'a> {
    cx: &'a NodeCx<'a>,
    quant: Quant,
    prepacked: i64,
}

impl Reader<'_> {
    /// Bits of a projection's weight in the model; whole elements have 0.
    fn bits(&self, slots: Slots) -> usize {
        match self.quant {
            Quant::None => 0,
            Quant::Fp8 => 8,
            Quant::Fp4 | Quant::Nvfp4 => 4,
            Quant::Int => {
                let all = self.cx.int("expert_weight_bits", 4);
                self.cx.int(&format!("{}_expert_weight_bits", slots.name), all) as usize
            }
        }
    }

    /// The shape of a projection's weights.
    fn shape(&self, slots: Slots) -> Result<[usize; 3]> {
        let Slots { name, weights, .. } = slots;
        let shape = self.cx.required(weights)?.known_shape().and_then(|s| <[usize; 3]>::try_from(s).ok());
        // Far from any overflow of what follows from the dims.
        let fits = |s: &[usize; 3]| s.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_some_and(|n| n < 1 << 48);
        shape.filter(|s| s.iter().all(|&d| d < 1 << 31) && fits(s)).ok_or_else(|| {
            let got = self.cx.input(weights).and_then(|f| f.shape.clone());
            self.cx.error(
                format_args!("input {weights} ({name}_experts_weights)"),
                format_args!("shape {got:?}"),
                "three known dims",
            )
        })
    }

    /// E, H and I, and whether the weights' dims say that they are not stored in rows of K.
    ///
    /// Rows: FC1 [E, N1, H / pack] and FC2 [E, H, I / pack]. Otherwise FC1 [E, H, N1 / pack] and FC2 [E, I, H / pack].
    fn sizes(&self, gate: Gate, fc1: Slots, fc2: Slots, bits: (usize, usize)) -> Result<(Sizes, bool)> {
        let ([e, a, b], [e2, c, d]) = (self.shape(fc1)?, self.shape(fc2)?);
        let values = |bytes: usize, bits: usize| (bytes * 8).checked_div(bits).unwrap_or(bytes);
        // FC2's scales, in the types that have them a row, tell H too.
        let scaled = |slot: usize| self.cx.input(slot).and_then(|f| f.dim(1).known());
        let rows = fc2.scales.filter(|_| self.quant != Quant::Fp8).and_then(scaled);
        let known = self.cx.required(INPUT)?.dim(-1).known().or(rows);
        let fits = |n1: usize, hidden: usize, inter: usize| {
            let sizes = Sizes { experts: e, hidden, inter };
            let whole = e > 0 && hidden > 0 && inter > 0 && n1 == gate.rows() * inter;
            (whole && e == e2 && known.is_none_or(|h| h == hidden)).then_some(sizes)
        };
        let row = |k: usize, bits: usize| if bits == 0 { k } else { (k * bits).div_ceil(8) };
        let rows = fits(a, c, a / gate.rows()).filter(|s| row(s.hidden, bits.0) == b && row(s.inter, bits.1) == d);
        let special = match self.quant {
            Quant::Int if bits.0 < 4 || bits.1 < 4 => None,
            Quant::None | Quant::Fp8 => None,
            _ => fits(values(b, bits.0), a, c).filter(|s| values(d, bits.1) == s.hidden),
        };
        let slot = format!("inputs {} and {} (fc1_experts_weights, fc2_experts_weights)", fc1.weights, fc2.weights);
        let got = format!("{:?} and {:?}", [e, a, b], [e2, c, d]);
        match (rows, special, self.quant, self.prepacked) {
            // The bytes are what the attribute says, whichever of the two shapes they have.
            (Some(sizes), _, Quant::Int, 1) | (_, Some(sizes), Quant::Int, 1) => Ok((sizes, true)),
            (Some(sizes), _, Quant::Int, 0) => Ok((sizes, false)),
            (_, Some(_), Quant::Int, 0) => Err(self.cx.error(
                slot,
                got,
                "[E, N, K / pack] as weights_prepacked = 0 says: these are the dims of prepacked weights",
            )),
            (Some(_), Some(_), ..) => Err(self.cx.error(
                slot,
                got,
                "dims that tell weights in rows of K from prepacked ones: set weights_prepacked to 0 or 1",
            )),
            (Some(_), None, Quant::Nvfp4, p) if p != 1 => {
                Err(self.cx.error(slot, got, "[E, K, N / 2], as nvfp4 weights have it unless weights_prepacked is 1"))
            }
            (Some(sizes), None, ..) => Ok((sizes, false)),
            (None, Some(sizes), ..) => Ok((sizes, self.quant != Quant::Nvfp4 || self.prepacked != 1)),
            (None, None, ..) => {
                let rows = gate.rows();
                let expected =
                    format!("[E, {rows} I, H * bits / 8] and [E, H, I * bits / 8] with H = {known:?} and one I and E");
                Err(self.cx.error(slot, got, expected))
            }
        }
    }

    fn check_separate(&self, fc3: Slots, sizes: Sizes, special: bool, bits: usize) -> Result<()> {
        let Slots { name, weights, .. } = fc3;
        let slot = format!("input {weights} ({name}_experts_weights)");
        if special {
            return Err(self.cx.error(slot, "a tensor", "none beside prepacked fc1 and fc2"));
        }
        let row = if bits == 0 { sizes.hidden } else { (sizes.hidden * bits).div_ceil(8) };
        let (got, expected) = (self.shape(fc3)?, [sizes.experts, sizes.inter, row]);
        if got != expected {
            return Err(self.cx.error(slot, format_args!("{got:?}"), format_args!("{expected:?}")));
        }
        Ok(())
    }

    fn matrix(&self, slots: Slots, (e, n, k): (usize, usize, usize), bits: usize, special: bool) -> Result<Matrix> {
        let (format, stored) = match self.quant {
            Quant::None => (Format::Dense(self.cx.required(slots.weights)?.dtype), Stored::Rows),
            Quant::Int => self.int(slots, (e, n, k), bits, special)?,
            Quant::Fp8 => self.fp8(slots, (e, n, k))?,
            Quant::Fp4 | Quant::Nvfp4 => {
                let block = if self.quant == Quant::Fp4 { 32 } else { 16 };
                if k % block != 0 || (special && n % 2 != 0) {
                    let slot = format!("input {} ({}_experts_weights)", slots.weights, slots.name);
                    let expected = format!("K a multiple of {block}, N even");
                    return Err(self.cx.error(slot, format_args!("N = {n}, K = {k}"), expected));
                }
                self.check(slots.scales, slots, "scales", &[&[e, n, k / block]])?;
                (Format::Fp4 { block }, if special { Stored::Columns } else { Stored::Rows })
            }
        };
        self.check(slots.global, slots, "global_scale", &[&[e]])?;
        self.check(Some(slots.bias), slots, "experts_bias", &[&[e, n]])?;
        Ok(Matrix { slots, n, k, format, stored })
    }

    fn fp8(&self, slots: Slots, (e, n, k): (usize, usize, usize)) -> Result<(Format, Stored)> {
        // A square that holds all of the matrix may be of any size.
        let block = (self.cx.int("block_size", 0).max(0) as usize).min(n.max(k));
        if block > 0 {
            self.check(slots.scales, slots, "scales", &[&[e, n.div_ceil(block), k.div_ceil(block)]])?;
        }
        Ok((Format::Fp8 { block }, Stored::Rows))
    }

    fn int(
        &self,
        slots: Slots,
        (e, n, k): (usize, usize, usize),
        bits: usize,
        special: bool,
    ) -> Result<(Format, Stored)> {
        let block = self.cx.int("block_size", 0).max(0) as usize;
        let blocks = if block == 0 { 1 } else { k.div_ceil(block) };
        // One scale a row has no need of its axis.
        let whole_rows: [&[usize]; 2] = [&[e, n, blocks], &[e, n]];
        self.check(slots.scales, slots, "scales", &whole_rows[..if blocks == 1 { 2 } else { 1 }])?;
        let along_k = [e, n, (blocks * bits).div_ceil(8)];
        let along_n = [e, (n * bits).div_ceil(8)];
        let zero_points: [&[usize]; 2] = [&along_k, &along_n];
        self.check(slots.zero_points, slots, "zero_points", &zero_points[..if blocks == 1 { 2 } else { 1 }])?;
        let zero = slots.zero_points.and_then(|slot| self.cx.input(slot));
        let zero_rows = zero.and_then(|f| f.rank()) == Some(2);
        let scales = slots.scales.map(|slot| self.cx.required(slot)).transpose()?;
        let layout = Layout {
            n,
            k,
            // Three bits travel as four.
            bits: if bits == 3 { 4 } else { bits },
            block: match block {
                0 => [256, 128, 64, 32].into_iter().find(|b| k % b == 0).unwrap_or(16),
                block => block.min(256),
            },
            scale: scales.map_or(DType::F32, |f| f.dtype),
            zero_point: if zero.is_some() { ZeroPoint::Bytes } else { ZeroPoint::Default },
        };
        if !special {
            return Ok((Format::Int(layout), Stored::Blocks { bits, block, zero_rows }));
        }
        let fits = k % 64 == 0 && k == layout.padded_k() && n % if bits == 4 { 16 } else { 8 } == 0;
        if !fits || !(bits == 4 || bits == 8) {
            return Err(self.cx.error(
                format_args!("input {} ({}_experts_weights)", slots.weights, slots.name),
                format_args!("{bits} bits, N = {n}, K = {k}"),
                "4 or 8 bits, N a multiple of 64 / bits, K of 64 and of the block, since the weights are prepacked",
            ));
        }
        Ok((Format::Int(layout), Stored::Cutlass { bits, block, zero_rows }))
    }

    /// Errors unless input `slot` is absent, or has one of the shapes, or an unknown one.
    fn check(&self, slot: Option<usize>, slots: Slots, what: &str, shapes: &[&[usize]]) -> Result<()> {
        let Some((slot, shape)) = slot.and_then(|s| Some((s, self.cx.input(s)?.shape.as_ref()?))) else {
            return Ok(());
        };
        let fits = |expected: &&[usize]| {
            expected.len() == shape.len()
                && shape.iter().zip(*expected).all(|(got, want)| match got {
                    Dim::Known(got) => got == want,
                    _ => true,
                })
        };
        if shapes.iter().any(fits) {
            return Ok(());
        }
        let expected: Vec<_> = shapes.iter().map(|s| format!("{s:?}")).collect();
        let slot = format!("input {slot} ({}_{what})", slots.name);
        Err(self.cx.error(slot, format_args!("shape {shape:?}"), expected.join(" or ")))
    }
}
