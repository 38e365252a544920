//! Constants of the model and their packed forms.
//!
//! Packed weights are keyed by what was packed and how, so that an initializer which several nodes share is
//! packed once. Raw bytes of external data are mapped, read once, and their pages given back.

use abi::file::MappedFile;
use abi::tensor::Element;
use abi::{DType, Error, HostTensor, Initializer, InitializerData, Result};
use std::any::Any;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

/// A constant's bytes: in memory of ours or mapped from its file.
#[derive(Clone)]
pub struct Constant {
    dtype: DType,
    shape: Vec<usize>,
    data: Data,
    identity: Identity,
}

#[derive(Clone)]
enum Data {
    Host(HostTensor),
    Mapped(MappedFile),
}

/// What makes two constants the same one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Identity {
    File {
        path: PathBuf,
        offset: u64,
        len: usize,
    },
    /// Address of a tensor that [`Constant`] keeps alive.
    Memory(usize),
}

impl Constant {
    /// Opens an initializer. Errors when its file is damaged or the sizes disagree.
    pub fn open(name: &str, init: &Initializer) -> Result<Self> {
        let problem = |problem: String| Error::Model { place: format!("initializer '{name}'"), problem };
        let (data, identity) = match &init.data {
            InitializerData::Inline(tensor) => {
                (Data::Host(tensor.clone()), Identity::Memory(tensor.bytes().as_ptr() as usize))
            }
            InitializerData::External { path, offset, len } => {
                let identity = Identity::File { path: path.clone(), offset: *offset, len: *len };
                (Data::Mapped(MappedFile::open(path, *offset, *len)?), identity)
            }
            InitializerData::Unread => return Err(problem("its bytes were not read".into())),
        };
        let constant = Self { dtype: init.dtype, shape: init.shape.clone(), data, identity };
        let expected = init.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).and_then(|n| init.dtype.bytes(n));
        if expected != Some(constant.bytes().len()) {
            let (got, shape) = (constant.bytes().len(), &init.shape);
            return Err(problem(format!("holds {got} bytes, but {}{shape:?} takes {expected:?}", init.dtype)));
        }
        // A file may place data at any offset; typed reads need alignment.
        let aligned = (constant.bytes().as_ptr() as usize).is_multiple_of(16);
        if aligned {
            return Ok(constant);
        }
        let tensor = HostTensor::from_bytes(init.dtype, &init.shape, constant.bytes());
        let tensor = tensor.ok_or_else(|| problem("the size changed".into()))?;
        Ok(Self { data: Data::Host(tensor), ..constant })
    }

    /// A computed constant.
    pub fn computed(tensor: HostTensor) -> Self {
        let identity = Identity::Memory(tensor.bytes().as_ptr() as usize);
        Self { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), data: Data::Host(tensor), identity }
    }

    /// The same bytes under another shape of as many elements.
    pub fn reshaped(&self, shape: Vec<usize>) -> Result<Self> {
        if shape.iter().product::<usize>() != self.shape.iter().product::<usize>() {
            return Err(Error::Internal(format!("{:?} is no reshape of {:?}", shape, self.shape)));
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// Whether both are the same bytes of the model, whatever their shapes.
    pub fn same_bytes(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The raw bytes, at least 16-byte aligned.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Host(tensor) => tensor.bytes(),
            Data::Mapped(file) => file.bytes(),
        }
    }

    /// The elements, or `None` when it holds another type.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        (self.dtype == T::DTYPE && (self.bytes().as_ptr() as usize).is_multiple_of(align_of::<T>())).then(|| {
            // SAFETY: aligned as checked, sized by `open`, and `T` is plain data.
            unsafe { std::slice::from_raw_parts(self.bytes().as_ptr().cast(), self.bytes().len() / size_of::<T>()) }
        })
    }

    /// The elements of a float32, float16 or bfloat16 constant as f32; `None` for other types.
    pub fn to_f32s(&self) -> Option<Vec<f32>> {
        Some(match self.dtype {
            DType::F32 => self.as_slice::<f32>()?.to_vec(),
            DType::F16 => self.as_slice::<half::f16>()?.iter().map(|v| v.to_f32()).collect(),
            DType::BF16 => self.as_slice::<half::bf16>()?.iter().map(|v| v.to_f32()).collect(),
            _ => return None,
        })
    }

    /// A copy that owns its bytes.
    pub fn to_tensor(&self) -> Result<HostTensor> {
        match &self.data {
            Data::Host(tensor) if tensor.shape() == self.shape => Ok(tensor.clone()),
            Data::Host(_) | Data::Mapped(_) => HostTensor::from_bytes(self.dtype, &self.shape, self.bytes())
                .ok_or_else(|| Error::Internal("a constant's size changed after it was opened".into())),
        }
    }

    /// Gives mapped pages back to the system: their bytes have been packed.
    pub fn forget_pages(&self) {
        if let Data::Mapped(file) = &self.data {
            file.forget_pages();
        }
    }
}

/// What was packed (`None` for an absent optional input), and into which layout.
type PackKey = (Vec<Option<Identity>>, String);

/// A session's packed weights. Clones share them.
#[derive(Clone, Default)]
pub struct PackCache(Arc<Mutex<HashMap<PackKey, Packed>>>);

/// A packed form that lives as long as some kernel uses it.
type Packed = Weak<dyn Any + Send + Sync>;

impl PackCache {
    /// The packed form of `constants` in `layout`, made by `pack` unless a live one exists.
    pub fn get<T: Any + Send + Sync>(
        &self,
        constants: &[Option<Constant>],
        layout: &str,
        pack: impl FnOnce(&[Option<Constant>]) -> Result<T>,
    ) -> Result<Arc<T>> {
        let identities = constants.iter().map(|c| c.as_ref().map(|c| c.identity.clone())).collect();
        let key: PackKey = (identities, layout.to_owned());
        let found = self.lock().get(&key).and_then(Weak::upgrade);
        if let Some(Ok(found)) = found.map(Arc::downcast) {
            return Ok(found);
        }
        let made: Arc<T> = Arc::new(pack(constants)?);
        constants.iter().flatten().for_each(Constant::forget_pages);
        let value: Arc<dyn Any + Send + Sync> = made.clone();
        self.lock().insert(key, Arc::downgrade(&value));
        Ok(made)
    }

    /// Forgets packed forms of constants in memory: an address names a constant only while it lives, which
    /// ends with the Compile that read it.
    pub fn end_compile(&self) {
        self.lock().retain(|(identities, _), packed| {
            packed.strong_count() > 0 && identities.iter().flatten().all(|i| matches!(i, Identity::File { .. }))
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PackKey, Packed>> {
        // Nothing panics while the lock is held but an allocation failure, after which the map is still whole.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Initializers in memory of at least this many bytes are compared with external ones.
const TWIN_BYTES: usize = 1 << 16;

/// Replaces initializers in memory by external ones with the same bytes.
///
/// ORT folds a Reshape of an external initializer into a copy in memory; the original, where another node still uses
/// it, serves both, and the copy need not stay for the session's life.
pub fn share_twins(graph: &mut abi::Graph) -> Result<()> {
    let mut externals: HashMap<usize, Vec<(PathBuf, u64)>> = HashMap::new();
    for init in graph.values.iter().filter_map(|v| v.initializer.as_ref()) {
        if let InitializerData::External { path, offset, len } = &init.data {
            externals.entry(*len).or_default().push((path.clone(), *offset));
        }
    }
    for init in graph.values.iter_mut().filter_map(|v| v.initializer.as_mut()) {
        let InitializerData::Inline(tensor) = &init.data else { continue };
        let len = tensor.bytes().len();
        let candidates = externals.get(&len).filter(|_| len >= TWIN_BYTES);
        for (path, offset) in candidates.into_iter().flatten() {
            let file = MappedFile::open(path, *offset, len)?;
            let same = file.bytes() == tensor.bytes();
            file.forget_pages();
            if same {
                init.data = InitializerData::External { path: path.clone(), offset: *offset, len };
                break;
            }
        }
    }
    Ok(())
}
