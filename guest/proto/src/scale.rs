//! Computes products and quotients of sizes and rates.

/// Computes `value * numerator / denominator` without intermediate overflow. The result saturates.
/// A denominator of 0 is treated as 1.
pub fn scale(value: u64, numerator: u64, denominator: u64) -> u64 {
    // A 128-bit division takes several times as long, and sizes and rates seldom need it.
    if let Some(product) = value.checked_mul(numerator) {
        return product / denominator.max(1);
    }
    let scaled = u128::from(value) * u128::from(numerator) / u128::from(denominator.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_neither_overflows_nor_divides_by_zero() {
        assert_eq!(scale(1 << 40, 125, 1000), (1u64 << 40) / 8);
        assert_eq!(scale(u64::MAX, 2, 1), u64::MAX);
        assert_eq!(scale(u64::MAX, 3, 6), u64::MAX / 2);
        assert_eq!(scale(7, 3, 0), 21);
    }
}
