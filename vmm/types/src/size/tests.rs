use proptest::prelude::*;

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

#[test]
fn units_are_powers_of_1024() {
    let sizes = [
        ("0", 0),
        ("7", 7),
        ("0007", 7),
        ("18446744073709551615", u64::MAX),
        ("4K", 4 * KIB),
        ("512M", 512 * MIB),
        ("2G", 2 * GIB),
        ("3T", 3 * TIB),
        ("4k", 4 * KIB),
        ("512m", 512 * MIB),
        ("2g", 2 * GIB),
        ("3t", 3 * TIB),
        ("4KiB", 4 * KIB),
        ("64MiB", 64 * MIB),
        ("2GiB", 2 * GIB),
        ("3TiB", 3 * TIB),
        ("64miB", 64 * MIB),
        ("16777215T", 16_777_215 * TIB),
    ];
    for (text, bytes) in sizes {
        assert_eq!(parse(text), Ok(bytes), "{text}");
        assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
    }
}

#[test]
fn fractions_of_a_unit_are_exact() {
    let sizes = [
        ("1.5G", 3 * GIB / 2),
        ("1.5GiB", 3 * GIB / 2),
        ("0.0625g", 64 * MIB),
        ("0.5K", 512),
        ("1.0", 1),
        ("1.500000000000000000000000000000000000000000000000M", 3 * MIB / 2),
        // 1 byte is 2^-40 T, which has 40 digits after the decimal point.
        ("0.0000000000009094947017729282379150390625T", 1),
        // This size needs 64 bits, and a double has only 53.
        ("16777215.9999999999990905052982270717620849609375T", u64::MAX),
    ];
    for (text, bytes) in sizes {
        assert_eq!(parse(text), Ok(bytes), "{text}");
    }
    let not_whole = [
        "1.5",
        "0.1K",
        "1.3G",
        "0.00000000000090949470177292823791503906251T",
        "0.0000000000009094947017729282379150390626T",
        "1.00000000000000000000000000000000000000000000000001K",
    ];
    for text in not_whole {
        assert_eq!(parse(text), Err(SizeError::NotWhole { text: text.to_owned() }), "{text}");
    }
}

#[test]
fn texts_without_number_or_with_unknown_unit_are_refused() {
    let texts = [
        "", "M", "iB", ".", "-1", "+1", "1X", "1E", "1P", "1iB", "1Ki", "1Kib", "1KIB", "64mib",
        "1KK", "1MiBs", "1B", "1b", " 1", "1 ", "1 G", "1 GiB", "1_000", "1,5G", "1.G", ".5G",
        "1.5.5G", "1..5G", "1e3", "0x10", "é", "1é", "1Mé", "١", "ms", "inf", "NaN",
    ];
    for text in texts {
        assert_eq!(parse(text), Err(SizeError::Malformed { text: text.to_owned() }), "{text:?}");
    }
}

#[test]
fn decimal_units_are_refused_with_both_readings() {
    let readings = [
        ("1KB", 1_000, 1_024),
        ("1kb", 1_000, 1_024),
        ("64MB", 64_000_000, 67_108_864),
        ("64Mb", 64_000_000, 67_108_864),
        ("1.5GB", 1_500_000_000, 1_610_612_736),
        ("0.1GB", 100_000_000, 107_374_182),
        ("2TB", 2_000_000_000_000, 2_199_023_255_552),
        ("16777215TB", 16_777_215_000_000_000_000, 16_777_215 << 40),
    ];
    for (text, decimal, binary) in readings {
        match parse(text) {
            Err(SizeError::Ambiguous { decimal_bytes, binary_bytes, .. }) => {
                assert_eq!((decimal_bytes, binary_bytes), (decimal, binary), "{text}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn sizes_beyond_64_bits_are_refused_with_the_bound() {
    for text in [
        "18446744073709551616",
        "16777216T",
        "18014398509481984K",
        "99999999999999999999999T",
        "16777216TB",
    ] {
        let refused = SizeError::TooLarge { text: text.to_owned(), most_bytes: u64::MAX };
        assert_eq!(parse(text), Err(refused), "{text}");
    }
}

#[test]
fn errors_name_text_and_bound() {
    let message = |text| parse(text).unwrap_err().to_string();
    assert_eq!(message("4Q"), r#""4Q" is not a size: bytes, or a number with K, M, G or T"#);
    assert_eq!(message("0.1K"), r#""0.1K" is not a whole number of bytes"#);
    assert_eq!(message("16777216T"), r#""16777216T" is more than 18446744073709551615 bytes"#);
    assert_eq!(
        message("64mb"),
        r#""64mb" could be 64000000 or 67108864 bytes; use 64M, 64MiB or the number of bytes"#
    );
}

#[test]
fn book_has_the_syntax() {
    assert!(include_str!("../../../../docs/reference/programs.md").contains(HELP));
}

#[test]
fn display_takes_the_largest_unit_that_divides() {
    let texts = [
        (0, "0", "0"),
        (1, "1 bytes", "1"),
        (1025, "1025 bytes", "1025"),
        (3 * KIB, "3 KiB", "3K"),
        (3 * MIB, "3 MiB", "3M"),
        (1536 * MIB, "1536 MiB", "1536M"),
        (4 * GIB, "4 GiB", "4G"),
        (512 * TIB, "512 TiB", "512T"),
        (u64::MAX, "18446744073709551615 bytes", "18446744073709551615"),
    ];
    for (bytes, shown, compact) in texts {
        assert_eq!(Size(bytes).to_string(), shown);
        assert_eq!(Size(bytes).compact(), compact);
    }
}

#[test]
fn rounded_text_is_exact_where_it_is_short() {
    let texts = [
        (0, "0"),
        (12, "12 bytes"),
        (3 * KIB, "3 KiB"),
        (6 * MIB, "6 MiB"),
        (MIB - KIB, "1023 KiB"),
        (MIB + KIB, "1.0 MiB"),
        (4 * GIB - 4 * MIB, "4092 MiB"),
        (4 * GIB, "4 GiB"),
        (99_999 * MIB, "99999 MiB"),
        (100_001 * MIB, "97.6 GiB"),
        (99_999 * GIB, "99999 GiB"),
        (100_001 * GIB, "97.6 TiB"),
        (1536 * GIB, "1536 GiB"),
        (512 * TIB, "512 TiB"),
    ];
    for (bytes, text) in texts {
        assert_eq!(Size(bytes).rounded(), text);
    }
}

#[test]
fn rounded_text_is_never_larger_than_the_size() {
    let texts = [
        (1025, "1.0 KiB"),
        (5 * MIB + 5 * KIB, "5.0 MiB"),
        (TIB - 10 * MIB, "1023.9 GiB"),
        (2 * TIB - 18 * MIB, "2047.9 GiB"),
        (100_000 * GIB - MIB, "99999.9 GiB"),
        (100_000 * GIB + MIB, "97.6 TiB"),
        (100 * TIB - 1, "99.9 TiB"),
        (u64::MAX, "16777215.9 TiB"),
    ];
    for (bytes, text) in texts {
        assert_eq!(Size(bytes).rounded(), text);
    }
}

/// Sizes of every magnitude, including multiples of every unit.
fn bytes() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0u32..64, 0u32..64).prop_map(|(bits, right, left)| (bits >> right) << left)
}

/// Decimal digits of `bytes` in units of 2^`shift`, without trailing zeros.
fn decimal(bytes: u64, shift: u32) -> String {
    let mask = (1u128 << shift) - 1;
    let mut text = (bytes >> shift).to_string();
    let mut rest = u128::from(bytes) & mask;
    if rest != 0 {
        text.push('.');
    }
    while rest != 0 {
        rest *= 10;
        text.push_str(&(rest >> shift).to_string());
        rest &= mask;
    }
    text
}

proptest! {
    #[test]
    fn compact_text_is_parsed_back(bytes in bytes()) {
        prop_assert_eq!(parse(&Size(bytes).compact()), Ok(bytes));
    }

    #[test]
    fn displayed_text_is_parsed_back_without_its_space(bytes in bytes()) {
        let text = Size(bytes).to_string();
        let text = text.strip_suffix(" bytes").unwrap_or(&text).replace(' ', "");
        prop_assert_eq!(parse(&text), Ok(bytes));
    }

    #[test]
    fn every_size_is_parsed_from_every_unit(bytes in bytes(), power in 0u32..=4) {
        let unit = ["", "K", "MiB", "g", "T"][power as usize];
        prop_assert_eq!(parse(&format!("{}{unit}", decimal(bytes, 10 * power))), Ok(bytes));
    }

    #[test]
    fn fractions_agree_with_wide_integers(
        integer in 0u32..1 << 24, fraction in 0u64..1_000_000_000, power in 0u32..=4, is_short: bool
    ) {
        let digits = if is_short { format!("{:09}", fraction / 1_000_000 * 1_000_000) } else { format!("{fraction:09}") };
        let nanos = u128::from(integer) * 1_000_000_000 + digits.parse::<u128>().unwrap();
        let scaled = nanos << (10 * power);
        let text = format!("{integer}.{digits}{}", ["", "K", "M", "G", "T"][power as usize]);
        match parse(&text) {
            Ok(bytes) => prop_assert_eq!(u128::from(bytes) * 1_000_000_000, scaled),
            Err(SizeError::NotWhole { .. }) => prop_assert_ne!(scaled % 1_000_000_000, 0),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn no_text_panics_and_every_error_is_one_line(text in ".*") {
        if let Err(error) = parse(&text) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn texts_near_the_syntax_do_not_panic(text in "[0-9.]{0,60}[KMGTkmgt]?i?[Bb]?") {
        if let Err(error) = parse(&text) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn rounded_text_is_never_more_than_the_size(bytes in bytes()) {
        let text = Size(bytes).rounded();
        let (number, unit) = text.split_once(' ').unwrap_or((&text, "bytes"));
        let (integer, tenths) = number.split_once('.').unwrap_or((number, "0"));
        let unit = UNITS.into_iter().find(|known| known.name == unit).map_or(1, Unit::bytes);
        let tenths = integer.parse::<u128>().unwrap() * 10 + tenths.parse::<u128>().unwrap();
        let shown = tenths * u128::from(unit) / 10;
        let bytes = u128::from(bytes);
        prop_assert!(shown <= bytes && bytes - shown <= u128::from(unit) / 10 + 1, "{}", text);
    }
}
