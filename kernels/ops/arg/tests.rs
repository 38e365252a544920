//! Examples of the definition.

use crate::eval::Single;
use crate::ops::testing::{fault, held, iota, run, tensor};
use abi::{Attr, DType};

#[test]
fn first_or_last_of_equals() {
    for dtype in [DType::F32, DType::F16, DType::I64, DType::U8] {
        let x = tensor(dtype, &[2, 3], &[2.0, 7.0, 7.0, 1.0, 0.0, 0.0]);
        let arg = |op: &str, axis| Single::new("", op, 13, 1).attr("axis", Attr::Int(axis)).input(x.clone());
        let max = run(&arg("ArgMax", 1));
        assert_eq!((max.shape(), held(&max)), (&[2, 1][..], vec![1.0, 0.0]));
        let last = Attr::Int(1);
        assert_eq!(held(&run(&arg("ArgMax", -1).attr("select_last_index", last.clone()))), [2.0, 0.0]);
        assert_eq!(held(&run(&arg("ArgMin", 1).attr("select_last_index", last))), [0.0, 2.0]);
        let columns = run(&arg("ArgMin", 0).attr("keepdims", Attr::Int(0)));
        assert_eq!((columns.shape(), held(&columns)), (&[3][..], vec![1.0; 3]));
    }
    assert_eq!(fault(&Single::new("", "ArgMax", 13, 1).input(iota(DType::F32, &[0, 2]))), "input 0 (data)");
}
