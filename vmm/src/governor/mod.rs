//! The loop that feeds reports to a policy and carries its plans out.
