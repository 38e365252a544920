//! The definition's pseudocode on small caches.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, run};
use abi::{Attr, HostTensor};

fn scatter(mode: &str, starts: &[i64]) -> Single {
    // B = 2, T = 4, S = 2, one value a position.
    let past = HostTensor::new(&[2, 4, 1], &[1f32, 2., 3., 4., 5., 6., 7., 8.]);
    let update = HostTensor::new(&[2, 2, 1], &[-1f32, -2., -3., -4.]);
    let single = Single::new("", "TensorScatter", 24, 1).attr("mode", Attr::String(mode.into()));
    single.input(past).input(update).input(ints(starts))
}

#[test]
fn linear_and_circular() {
    assert_eq!(held(&run(&scatter("linear", &[1, 2]))), [1., -1., -2., 4., 5., 6., -3., -4.]);
    assert_eq!(held(&run(&scatter("circular", &[3, 0]))), [-2., 2., 3., -1., -3., -4., 7., 8.]);
}

#[test]
fn positions_beyond_the_cache_are_named() {
    for (mode, starts) in [("linear", [0, 3]), ("linear", [-1, 0]), ("circular", [4, 0])] {
        assert_eq!(fault(&scatter(mode, &starts)), "input 2 (write_indices)");
    }
    assert_eq!(fault(&scatter("linear", &[0])), "input 2 (write_indices)");
}
