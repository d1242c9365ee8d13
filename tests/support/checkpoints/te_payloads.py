"""Extra states that Transformer Engine's own recipe classes were pickled in.

Made by the recipes of the releases in their names, with Python 3.11 and torch 2.13: a margin of 1
and `most_recent` in 2.4, one product; E4M3 in 2.20, three products; MXFP8, which has no scales.
Histories are `arange(1, ...) / 8`, row by row, but for zeros in row 0.
"""

from __future__ import annotations

import base64
import zlib

DELAYED_2_4 = zlib.decompress(
    base64.b85decode(
        "c-qxf&rcIU6y9I7&;mh?2SZ|r2UB9wXqUor5d)-}Y(Rx*_F~5A?zFqQyR$!Lk(!W{0|d+-Oc-w-JbLu(i9dy"
        "-o;;g)@NKuXslXq=Ca;-!{r1h9?|u7TSNZg-AoQL+UP%iPF`a<$bdE*Xk6SeINQ8*rc6?GbspnC@I)F^C6Bl"
        "=gwQXY8@!R}_&+qeI5D!Q20@uZ~)Cx3|MZt{QQd(%_%ad#~h4S4K;szuF-^Qu9A)FoZeSW~VcsheUyo+onW;"
        "E&`mq0)zz1DL=CPBgo!fu=LwCvHCAxMk(jHk14o)2na6W$!fZl>jkScwT+h{KQ4VwRv4V1Ar0JsXxuGo8qy5"
        "Y&2S@pKZxn06H<%yDC$UWcQaiQ`&`5kH0#c50A(C7sG)S-Q9l{LCPiVhgn*>Y-+bkr+^`MNtsC(ub1!=X2xt"
        "+?%h@ZdJR|#!nf3_d=m!%s?T6h%#zY7wwQJcBmhU05GQDAJ<_FvLe3aU_X?Oj1o9mCm<+x-jg_#_d=y&jDa("
        "@X~e=YT{2|YIX(*ux?(6<4C=STqOK$foLMo788}Zl6wKZgN)1SyZRgHXC>qm%Szb`J1+BjHK&#)cFNS$sGe|"
        ";Nmp56cJcnqnLg6B;h^ulgF+o+;weLUfti613bFEipUC`wNP|5)mpbU3*iOJx~Ky&$NWDzLVx?^U7ncw2<ye"
        "hK#*s~S;_UgSWPVAz(tSzXu5n?AVA$EWTVkd<QpA|uv1A7Ga8mtTU5$p@tH?Y%{0r`q9A97vR#Y28<-yM+LS"
        "AX*#yYf|McS)_)mPXl?E@QWk1$Lz&qmKpQtTA9s>PvRW*r+Ur#LZsy?_IrL*EDT}xbe%r_dXVg8$YMW(}x$y"
        "awtOyWGMY7!y9B5#t_Q-@(zw1+;pLdW)o&QbD1_V-v$)!3VnRSPdwBno)>3hr`&7hP>`%Yz*reNvdX}a0W$s"
        "q)Nvok"
    )
)

MXFP8_2_4 = zlib.decompress(
    base64.b85decode(
        "c-l2iy9&ZU5L6LGK|%ZhOKnnHTZj+>qK(~go@;WLdvHm_M$kf0xX$%|{2IT*y9AdlW`>=ay)@t7S~X`J+m->"
        "wHJ}~khRSTOi~vJG##}<cln_b=|C2$qnJ=faRI$UF(Ui*=UpTp9nIoui9t>-?yVq0VgJ_OP!?xxXe0kC%6<a"
        "{6!8k4Y)ZO0kiZ@)LZF}!dQ+!rXBn}o^JA{+_k9g@w4X4`_va+}DC6)j?XvJlY58IK2ATbD$Vb~~&;0FO_U3"
        "&"
    )
)

DELAYED_2_20 = zlib.decompress(
    base64.b85decode(
        "c-qyKPiP!f9LL}O>BikOA+-o8Ei`Dst;iB~(_|NfhS?GdLt|}G21H)p&b-|jJAdE2Ns~%o3#OzxheBU(J=mM"
        "*p*?%*LGV&V+LO25)Jy421P^{^|1_)`L_B5K&ob{fzxmB?zQ5m_U%z<w+bJ?QwpBGP32r(eSLuQj%#XW)@VK"
        "Dd?>RoNnStj8er@bBdyczoi(8jX<~n{)-BG7+s6h~q3EZG`l2*E5lV(wvRCYcstqo7_WQ!R(T%G4`$OUW{9_"
        "8@6scxtpbxEaj%wwC>c48TbE$VUvET%^WMr0Bul2hjP0+kkEQt9z{m<R1L6L(Ddtf$k0TZxHf=DeFuWr<lKQ"
        "@4hvo}HZ@=`i!^H6|<?Y;YkQi>vjdla{m4oOZ8SDm{$Yrd^|nblg~_uTsG~iQ`&SazDmnH|ltkYC1D?%W`Ku"
        "h&4yufLXLF0*`jKB#+^xoy-x^&wo~N|G2mI`@+XxUOZOo=P&$P!2fncs>U3u5{f_uX5dmJ6gz<*<=|k<;EL-"
        "=iLAJ9In0mpyG8{@xfOC6JJ)#}6}F>d)i?xWYzIO{hxEKrz{>GuRMLw^F^duSy=Y1=CJCNdHL^|^r5q7+@Cu"
        "bRBrY!xjg=^8%)+O&)Mzd>&#Wx9TJ_d)G>mJ8NmS6w>oO|7hiD%~<ez+VtX3v3kM<jH|E9fo{#^T^^|MCEGi"
        "`nOC++EzC))RqA8X>ociNy8bfTAcl%Cr`iKd~2%S{O>Api8c!s4jxImgVp>hvWg|K2)T-Ru)p`=s{yK^MHf("
        "rUEo6M~=GPw<g11V2Uo%kjloLLP!g;79NbyZ~gCkXOJQm<J1>3Kl^Vtb+64A~3)eV1p2Bf<E{Z?1B{BUL6;="
        "sF!aly{u#J-?HBv7jd-fIxnkt^q^Po%*tYYu{lw_(tgz&`J#HIQC%L~f2ZAOG}>Q(^;Y|vUtVv2^7MH7gZE!"
        "+k5w#<w#c4>liOfV$PW*=kju+;d`cE4gq+_;$gwYkod4I>zk)XJgWG5S&o<a=>k`_!^q00i$~Q4vX*P5=m~d"
        "Ff#W2Xm=4@s%ZEju-189XIRrV8)_PFQ8N-w0-gE@tQX5TXm$~{A8Xn>f10=OzpY5"
    )
)
